"""A token goes to the experts that its sample says, in every layout, and the router learns from it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import parity
import policy_with_routes
import pytest
import torch

from megatron_vlm.batch import DataNeeds
from megatron_vlm.models.layers.routes import FREE_ROUTE, ROUTE_OF_PADDING
from megatron_vlm.models.stream import StreamLayout
from megatron_vlm.rl.micro_batches import documents_of, micro_batches
from megatron_vlm.rl.routes import add_routes

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
        policy_with_routes.LAYOUTS,
        policy_with_routes.cases,
        policy_with_routes.measure,
    )


def cells() -> list:
    """`make test-long` has each layout of one and two processes with one family, in turn."""

    def mark(number: int, place: int, processes: int) -> pytest.MarkDecorator:
        in_turn = (number + place) % len(FAMILIES) == 0
        return pytest.mark.long if processes < 4 and in_turn else pytest.mark.soak

    return [
        pytest.param(family, layout, marks=mark(number, place, processes))
        for number, family in enumerate(FAMILIES)
        for place, (layout, (processes, *_)) in enumerate(policy_with_routes.LAYOUTS.items())
    ]


@pytest.mark.parametrize(("family", "layout"), cells())
def test_given_experts_are_taken_as_by_transformers(rows_of, family, layout):
    rows = rows_of(policy_with_routes.LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["moved"] > 1e-2 and row["router gradient"] > 0, "the test sees nothing"
    assert row["log_probs"] <= 1e-5 and row["gradient"][0] <= 1e-4 and row["loss"] <= 1e-4, row


@pytest.mark.parametrize(("family", "layout"), cells())
def test_own_experts_are_recorded_and_replayed_to_the_bit(rows_of, family, layout):
    """In the reversed order, too; and the first ratio is 1."""
    rows = rows_of(policy_with_routes.LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["layers"] > 0 and row["other experts"] == 0, row
    assert row["replayed alike"] and row["ratio"] == 1, row
    assert row["alone"] <= 1e-5, "a rank without samples takes part"
