"""A policy's memory can be released and brought back between any two calls, and no number changes."""

from __future__ import annotations

import policy_in_ranks
import policy_offload
import pytest
import torch

from megatron_vlm.rl.memory import LARGEST, SMALLEST, pieces
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

CASES = pytest.mark.parametrize("case", policy_offload.CASES)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("memory")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    given = str(path), str(folder / "held.pt"), list(policy_offload.CASES)
    return run_distributed(2, policy_offload.measure, *given, timeout=600)


@pytest.mark.parametrize("size", [0, 1, SMALLEST, 33 * 10**9, 3 * LARGEST - 1, 2**34])
def test_pinned_pieces_waste_little(size):
    """torch's allocator of pinned memory rounds each up to a power of two; one piece of 33 GB took 64 GiB."""
    sizes = pieces(size)
    assert sum(sizes) == size and len(sizes) < size / LARGEST + 10
    assert sum(1 << (each - 1).bit_length() for each in sizes) < size + SMALLEST


@pytest.mark.long
@CASES
def test_nothing_is_left_of_what_is_offloaded(found, case):
    for rank in found:
        for left in (rank[case]["left at first"], rank[case]["left"]):
            assert {size for _, size in left.values()} == {0}, left
        held = {name for name, (count, _) in rank[case]["left"].items() if count}
        assert held >= {"weights", "gradients", "moments", "main weights"}
        assert ("buffers" in held) == ("shares" in case)
        assert not any(rank[case]["zeros kept"])
        assert rank[case]["pieces"] > 2


@pytest.mark.long
@CASES
def test_what_comes_back_is_equal_to_the_bit(found, case):
    for rank in found:
        assert rank[case]["as before"] and rank[case]["grads as before"]
    assert any(rank[case]["grads are some"] for rank in found)


@pytest.mark.long
@CASES
def test_steps_are_those_of_a_policy_that_stays(found, case):
    for rank in found:
        stays, moves = rank[case]["stays"], rank[case]["moves"]
        assert stays.keys() == moves.keys() and rank[case]["stays norm"] == rank[case]["moves norm"]
        assert all(torch.equal(stays[name], moves[name]) for name in stays)
