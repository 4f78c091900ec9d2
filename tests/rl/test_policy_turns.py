"""A policy answers, learns and answers again as one that only learned, and its step is Megatron's."""

from __future__ import annotations

import parity
import policy_in_ranks
import policy_in_turns
import pytest
import torch

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed


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
    [found] = run_distributed(1, policy_in_turns.by_turns, asked, timeout=1200)
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
    return run_distributed(2, policy_in_turns.steps, paths, held, timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("layout", policy_in_turns.STEPS)
def test_a_step_is_that_of_megatron_with_one_norm(steps, layout):
    for rank in steps:
        ours, theirs = rank[layout]["ours"], rank[layout]["megatron's"]
        assert ours["norm"] == theirs["norm"] > rank[layout]["clip"] > 0, "gradients are not clipped"
        assert ours["norms"] == theirs["norms"] > 0
        assert all(map(torch.equal, ours["weights"], theirs["weights"])) and rank[layout]["moved"]
