"""A policy answers, learns and answers again as one that only learned, and its step is Megatron's."""

from __future__ import annotations

from typing import Any

import parity
import policy_in_ranks
import pytest
import saved_cases
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vlm.config import ParallelConfig
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- what runs in the ranks


NEW_TOKENS = 6
# name -> layout, dtype
STEPS = {
    "DP2 dist. optimizer": (ParallelConfig(distributed_optimizer=True), "bf16"),
    "TP2+SP": (ParallelConfig(tp=2, distributed_optimizer=False), "fp32"),
    "EP2": (ParallelConfig(ep=2), "fp32"),
}


def by_turns(asked: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """By family, what a policy does that answers before and between, and one that does not."""
    return {family: _turns(path, held) for family, (path, held) in asked.items()}


def _turns(path: str, held: str) -> dict[str, Any]:
    samples, _ = saved_cases.read(held)
    plain = policy_in_ranks.policy_of(path, ParallelConfig(), 300)
    found = {"plain": [*_learnt(plain, samples), _answers(plain)]}
    policy = policy_in_ranks.policy_of(path, ParallelConfig(), 300)
    with torch.inference_mode():
        before, scored = _answers(policy), policy.logprobs(samples).log_probs
        made = [{key: value.clone() for key, value in sample.items()} for sample in samples]
    assert made[0]["input_ids"].is_inference() and scored[0].is_inference()
    with torch.no_grad():
        policy.logprobs(made)
        again = _answers(policy)
    made = [sample | {"old": old} for sample, old in zip(made, scored, strict=True)]
    found["turns"] = [*_learnt(policy, made), _answers(policy)]
    return found | {"as before": before == again, "moved": before != found["turns"][-1]}


def _learnt(policy, samples: list[dict]) -> list[float]:
    """The loss and the norm of two steps."""
    figures = []
    for _ in range(2):
        figures.append(_backward(policy, samples)["loss"])
        figures.append(policy.step())
    return figures


def _backward(policy, samples: list[dict]) -> dict[str, float]:
    return policy.forward_backward(samples, policy_in_ranks.loss, 0.01, entropy=True, fields=["advantage"])


def _answers(policy) -> list[list[float]]:
    """Tokens and log-probabilities of sampled answers."""
    from megatron_vlm.rl.rollouts import OwnEngine

    found = OwnEngine(2, NEW_TOKENS)(policy, policy_in_ranks.prompts_of(policy.source)[:2])
    return [[*one["input_ids"].tolist(), *one["rollout_log_probs"].tolist()] for one in found]


class Norms(TorchDispatchMode):
    """How often norms of all gradients were taken."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten._foreach_norm
        return function(*args, **(kwargs or {}))


def steps_in_turns(paths: dict[str, str], held: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By layout, a policy's step and Megatron's: weights, norms, and how often these were computed."""
    found = {}
    for name, (layout, dtype) in STEPS.items():
        family = "qwen3_vl_moe" if layout.ep > 1 else "gemma3"
        samples, _ = saved_cases.read(held[family])
        row: dict[str, Any] = {}
        for whose, take in {"ours": lambda policy: policy.step(), "megatron's": megatron_step}.items():
            policy = policy_in_ranks.policy_of(paths[family], layout, 300, dtype=dtype)
            before = [param.detach().clone() for param in policy.chunks[0].parameters()]
            _backward(policy, policy_in_ranks.mine(samples))
            with Norms() as norms:
                norm = take(policy)
            weights = [param.detach().clone() for param in policy.chunks[0].parameters()]
            row[whose] = {"norm": norm, "norms": norms.count, "weights": weights}
            row["moved"] = any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
        row["clip"] = policy.config.optimizer.clip_grad
        found[name] = row
    return found


def megatron_step(policy) -> float:
    from megatron_vlm.training.step import reduce_gradients

    reduce_gradients(policy.chunks)
    return policy.optimizer.step()[1]


# ---- the tests


@pytest.fixture(scope="module")
def turns(request, tmp_path_factory) -> dict[str, dict]:
    """By family; one process for all that are asked for."""
    asked = {}
    for item in request.session.items:
        if item.path == request.path and "family" in getattr(getattr(item, "callspec", None), "params", {}):
            family = item.callspec.params["family"]
            folder = tmp_path_factory.mktemp(family)
            path = build_tiny_checkpoint(family, folder / "checkpoint")
            torch.save((policy_in_ranks.samples_of(family, path), None), folder / "held.pt")
            asked[family] = str(path), str(folder / "held.pt")
    [found] = run_distributed(1, by_turns, asked, timeout=1200)
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", parity.FAMILIES)
def test_answers_in_between_change_no_number(turns, family):
    """To the bit: also under `inference_mode`, which leaves no tensor that a backward pass then meets."""
    found = turns[family]
    assert found["turns"] == found["plain"]
    assert found["as before"] and found["moved"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[dict]:
    paths, held = {}, {}
    for family in ("gemma3", "qwen3_vl_moe"):
        folder = tmp_path_factory.mktemp(f"steps_{family}")
        paths[family], held[family] = str(folder / "checkpoint"), str(folder / "held.pt")
        path = build_tiny_checkpoint(family, folder / "checkpoint")
        torch.save((policy_in_ranks.samples_of(family, path), None), held[family])
    return run_distributed(2, steps_in_turns, paths, held, timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("layout", STEPS)
def test_a_step_is_that_of_megatron_with_one_norm(steps, layout):
    for rank in steps:
        ours, theirs = rank[layout]["ours"], rank[layout]["megatron's"]
        assert ours["norm"] == theirs["norm"] > rank[layout]["clip"] > 0, "gradients are not clipped"
        assert ours["norms"] == theirs["norms"] > 0
        assert all(map(torch.equal, ours["weights"], theirs["weights"])) and rank[layout]["moved"]
