"""What `test_rl_routes.py` runs: a policy whose samples say which experts their tokens go to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import policy_in_ranks
import saved_cases
import torch

from megatron_vlm.config import ParallelConfig

FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
LAYOUTS: dict[str, tuple[int, ParallelConfig, dict[str, str]]] = {
    "1 process": (1, ParallelConfig(), {}),
    "1 process, recomputed": (1, ParallelConfig(), FULL),
    "TP2+SP, recomputed": (2, ParallelConfig(tp=2), FULL),
    "PP2·VPP2, recomputed": (2, ParallelConfig(pp=2, vpp=2), FULL),
    "PP2, feed-forwards recomputed": (2, ParallelConfig(pp=2), SELECTIVE),
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
