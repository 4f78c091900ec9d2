"""A rank that fails alone, in the middle of a pass, ends it on every rank within seconds, with its words."""

from __future__ import annotations

import time

import alarm_cells
import policy_cells
import pytest
import torch

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

SOON = 60  # seconds, on a machine where others wait for the processor, too; gloo's own limit is 1800


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("alarm")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_cells.samples_of("gemma3", path), None), folder / "held.pt")
    return run_distributed(2, alarm_cells.measure, str(path), str(folder / "held.pt"), timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("case", alarm_cells.CASES)
def test_an_error_of_one_rank_in_a_pass_is_one_of_all(found, case):
    first, second = (rank[case] for rank in found)
    words = f"OutOfMemoryError: {alarm_cells.OUT_OF_MEMORY}"
    assert second["said"] == words
    assert first["said"] == f"AnotherRankFailed: rank 1 has failed: {words}"
    for rank in (first, second):
        assert rank["seconds"] < SOON and rank["training"]
        assert rank["again"].startswith(f"AnotherRankFailed: rank 1 has failed: {words}; start again")


def test_a_rank_that_cannot_be_woken_is_ended():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 2 failed") as raised:
        run_distributed(2, alarm_cells.stuck, timeout=300)
    assert time.monotonic() - began < SOON
    assert str(raised.value).strip().endswith(r"rank 1 has failed: MemoryError: no more\x1b[31m")
