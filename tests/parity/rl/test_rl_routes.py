"""A token goes to the experts that its sample says, in every layout, and the router learns from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import parity
import policy_in_ranks
import pytest
import saved_cases
import torch

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.layers.moe import FREE_ROUTE, ROUTE_OF_PADDING
from megatron_vlm.models.stream import StreamLayout
from megatron_vlm.rl.micro_batches import documents_of, micro_batches
from megatron_vlm.rl.routes import add_routes

# ---- what runs in the ranks


FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
LAYOUTS: dict[str, tuple[int, ParallelConfig, dict[str, str]]] = {
    "1 process": (1, ParallelConfig(), {}),
    "1 process, recomputed": (1, ParallelConfig(), FULL),
    "TP2+SP, recomputed": (2, ParallelConfig(tp=2), FULL),
    "PP2·VPP2, recomputed": (2, ParallelConfig(pp=2, vpp=2), FULL),
    "PP2, norms and gates recomputed": (2, ParallelConfig(pp=2), SELECTIVE),
    "CP2": (2, ParallelConfig(cp=2), {}),
    "EP2": (2, ParallelConfig(ep=2), {}),
    "CP2·EP2, recomputed": (2, ParallelConfig(cp=2, ep=2), FULL),
    "EP2·TP2+SP": (4, ParallelConfig(ep=2, tp=2), {}),
    "CP2·PP2, recomputed": (4, ParallelConfig(cp=2, pp=2), FULL),
}


def cases(family: str, path: Path | str) -> tuple[list[dict], dict, list[dict], dict]:
    """Samples without and with routes, each with what Transformers makes of them. The last of those with has
    none, the one before lacks the last token's; a fifth of all rows lets the router choose."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(path).text_config
    experts = getattr(text, "num_experts", None) or text.n_routed_experts
    choices = getattr(text, "top_k_experts", None) or text.num_experts_per_tok
    free = policy_in_ranks.samples_of(family, path)
    numbers, routed = torch.Generator().manual_seed(5), []
    for sample in free:
        shape = len(sample["input_ids"]), text.num_hidden_layers
        routes = torch.rand(*shape, experts, generator=numbers).argsort(-1)[..., :choices]
        routes[torch.rand(shape, generator=numbers) < 0.2] = -1
        routed.append(sample | {"routes": routes.short()})
    routed[-2]["routes"] = routed[-2]["routes"][:-1]
    del routed[-1]["routes"]
    return free, policy_in_ranks.reference(path, free), routed, policy_in_ranks.reference(path, routed)


def measure(names: list[str], path: str, held: str) -> list[dict]:
    """A row for each layout, the worst of all ranks."""
    return [{"layout": name} | _measure(name, path, saved_cases.read(held)) for name in names]


def _measure(name: str, path: str, held: tuple) -> dict[str, Any]:
    free, of_free, routed, of_routed = held
    policy = policy_in_ranks.policy_of(path, LAYOUTS[name][1], 300, **LAYOUTS[name][2])
    own = policy_in_ranks.mine(free)
    scores = policy.logprobs(own, routes=True)
    first = next(number for number, sample in enumerate(free) if sample is own[0])
    row: dict[str, Any] = {"other experts": 0, "layers": 0}
    for routes, theirs in zip(scores.routes, of_free["experts"][first:], strict=False):
        for layer, experts in theirs.items():
            row["other experts"] += int((routes[:, layer] != experts).any(-1).sum())
            row["layers"] += 1
    own_routes = [s | {"routes": r.flip(-1)} for s, r in zip(own, scores.routes, strict=True)]
    replayed = policy.logprobs(own_routes).log_probs
    row["replayed alike"] = all(map(torch.equal, replayed, scores.log_probs))
    row["ratio"] = _first_ratio(policy, own_routes, replayed)
    row["moved"] = (of_routed["log_probs"][1] - of_free["log_probs"][1]).abs().max().item()
    row["alone"] = _alone(policy, routed, of_routed["log_probs"])
    row |= policy_in_ranks.differences(policy, routed, of_routed)
    routers = [key for key in of_routed["grads"] if key.endswith(("mlp.gate.weight", "router.proj.weight"))]
    row["router gradient"] = min(of_routed["grads"][key].abs().max().item() for key in routers)
    return _of_all_ranks(row)


def _alone(policy, samples: list, expected: list[torch.Tensor]) -> float:
    """The worst log-probability where only the first of data-parallel ranks has samples."""
    from megatron.core import parallel_state

    mine = [] if parallel_state.get_data_parallel_rank() else samples
    found = policy.logprobs(mine, policy_in_ranks.TEMPERATURE).log_probs
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) if mine else 0.0


def _first_ratio(policy, samples: list, old: list[torch.Tensor]) -> float:
    from megatron_vlm.rl import losses

    scored = [sample | {"old": each} for sample, each in zip(samples, old, strict=True)]
    logs = policy.forward_backward(
        scored,
        lambda log_probs, _, fields: losses.ppo_clip(log_probs, fields["old"], torch.ones_like(log_probs)),
        5,
        fields=["old"],
    )
    policy._empty()
    return logs["ratio"] if logs["old_kl"] == 0 else logs["old_kl"]


def _of_all_ranks(row: dict[str, Any]) -> dict[str, Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, row)
    return row | {
        "other experts": max(each["other experts"] for each in every),
        "alone": max(each["alone"] for each in every),
        "replayed alike": all(each["replayed alike"] for each in every),
    }


# ---- the tests


FAMILIES = ["qwen3_vl_moe", "glm4v_moe", "gemma4", "qwen3_5_moe"]
EXPERTS = SimpleNamespace(  # of a model whose second of three layers has none
    config=SimpleNamespace(num_moe_experts=8, num_layers=3, moe_router_topk=2, moe_layer_freq=[1, 0, 1])
)
DENSE = SimpleNamespace(config=SimpleNamespace(num_moe_experts=None))


def rows_with(samples: list[dict], model=EXPERTS) -> list:
    rows = micro_batches(documents_of(samples, DataNeeds()), 20)
    add_routes(rows, [model])
    return rows


def sample(tokens: int, seed: int, rows: int | None = None) -> dict:
    numbers = torch.Generator().manual_seed(seed)
    routes = torch.rand(tokens if rows is None else rows, 3, 8, generator=numbers).argsort(-1)[..., :2]
    return {"input_ids": torch.arange(tokens), "routes": routes}


@pytest.mark.parametrize("ranks", [1, 2])
def test_routes_go_where_their_tokens_go(ranks):
    """Through packing and context parallelism; tokens without any, dense layers and padding are marked."""
    given = [sample(11, 1), {"input_ids": torch.arange(3)}, sample(9, 2, rows=8), sample(17, 3)]
    given[3]["routes"][5] = -1
    seen = 0
    for row in rows_with(given):
        expected = torch.full((row.batch["input_ids"].numel(), 3, 2), FREE_ROUTE)
        for document, start in zip(row.documents, starts(row), strict=True):
            routes = given[document.number].get("routes", torch.empty(0, 3, 2).long())
            expected[start : start + len(routes), [0, 2]] = routes[:, [0, 2]]
        layout = StreamLayout(row.batch, np.zeros_like, False, ranks)
        for rank in range(ranks):
            stream = layout.stream(rank, 24, [None], torch.device("cpu"))
            held = stream.plan.places
            assert torch.equal(stream.routes[0, : len(held)].long(), expected[held])
            assert (stream.routes[0, len(held) :] == ROUTE_OF_PADDING).all() and len(held) < 24
            seen += len(held)
    assert seen == 40


def starts(row) -> list[int]:
    ends = torch.tensor([len(document.input_ids) for document in row.documents]).cumsum(0)
    return [0, *ends[:-1].tolist()]


def test_rows_without_routes_have_no_field():
    assert (
        "routes" not in rows_with([{"input_ids": torch.arange(5), "routes": torch.empty(0, 3, 2)}])[0].batch
    )
    assert "routes" not in rows_with([{"input_ids": torch.arange(5)}], DENSE)[0].batch


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(
        request,
        tmp_path_factory,
        LAYOUTS,
        cases,
        measure,
    )


def cells() -> list:
    """`make test-long` has each layout of one and two processes with one family, in turn."""

    def mark(number: int, place: int, processes: int) -> pytest.MarkDecorator:
        in_turn = (number + place) % len(FAMILIES) == 0
        return pytest.mark.long if processes < 4 and in_turn else pytest.mark.soak

    return [
        pytest.param(family, layout, marks=mark(number, place, processes))
        for number, family in enumerate(FAMILIES)
        for place, (layout, (processes, *_)) in enumerate(LAYOUTS.items())
    ]


@pytest.mark.parametrize(("family", "layout"), cells())
def test_given_experts_are_taken_as_by_transformers(rows_of, family, layout):
    rows = rows_of(LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["moved"] > 1e-2 and row["router gradient"] > 0, "the test sees nothing"
    assert row["log_probs"] <= 1e-5 and row["gradient"][0] <= 1e-4 and row["loss"] <= 1e-4, row


@pytest.mark.parametrize(("family", "layout"), cells())
def test_own_experts_are_recorded_and_replayed_to_the_bit(rows_of, family, layout):
    """In the reversed order, too; and the first ratio is 1."""
    rows = rows_of(LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["layers"] > 0 and row["other experts"] == 0, row
    assert row["replayed alike"] and row["ratio"] == 1, row
    assert row["alone"] <= 1e-5, "a rank without samples takes part"
