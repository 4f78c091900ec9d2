"""One rank that cannot go on ends all of them, soon and with its reason; drops are counted over all ranks."""

from __future__ import annotations

import time

import pytest

from megatron_vlm.config import ParallelConfig
from megatron_vlm.data.drops import DropReport, TooManyDrops
from megatron_vlm.data.loaders import LimitedDrops
from megatron_vlm.testing.distributed import run_distributed

MAX_SHARE = 0.1


def _batch(rank: int) -> dict:
    return {"visual_inputs": None, "__key__": [[f"of-{rank}"]]}


def _reading(drops: LimitedDrops, rank: int, dropped_by_rank: list[int]):
    """Each batch costs 100 samples, of which a rank drops its own number, spread evenly."""
    while True:
        for number in range(100):
            if number * dropped_by_rank[rank] % 100 < dropped_by_rank[rank]:
                drops.drop(f"{rank}-{number}", "bad_json")
            else:
                drops.keep()
        yield _batch(rank)


def _run(parallel: ParallelConfig, dropped_by_rank: list[int], steps: int) -> tuple[int, str, float]:
    """(steps taken, what ended them, seconds)."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.parallel.broadcast import BatchBroadcaster, ReadFailed

    setup.reset_layout(parallel, 1)
    broadcaster, began = BatchBroadcaster(), time.monotonic()
    report = DropReport(ranks=setup.data_parallel_place()[1])
    rank, _ = setup.data_parallel_place()
    batches = _reading(LimitedDrops(report, MAX_SHARE), rank, dropped_by_rank) if broadcaster.reads else None
    for step in range(steps):
        try:
            broadcaster.take(batches, 1, report if broadcaster.reads else None)
        except ReadFailed as error:
            return step, str(error), time.monotonic() - began
    return steps, str(report.on_all_ranks()), time.monotonic() - began


def _all_cases() -> dict:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), 1)
    return {
        "uneven": _run(ParallelConfig(), [15, 0], 8),  # 15 % of one rank's, 7.5 % of all
        "many": _run(ParallelConfig(), [60, 0], 8),  # 15 % of all
        "group": _run(ParallelConfig(tp=2), [30], 8),
    }


@pytest.fixture(scope="module")
def by_rank():
    return run_distributed(2, _all_cases)


def test_the_budget_is_over_all_ranks(by_rank):
    steps, counted, _ = by_rank[0]["uneven"]
    assert (steps, counted) == (8, str([8 * 185, 8 * 15]))


def test_every_rank_ends_with_the_reason_of_the_one_that_gave_up(by_rank):
    (steps, text, seconds), (other_steps, other_text, other_seconds) = (rank["many"] for rank in by_rank)
    assert steps == other_steps < 8 and text == other_text
    assert "TooManyDrops: data: " in text and "more than data.max_drop_share = 10.0%" in text
    assert "bad_json" in text
    assert max(seconds, other_seconds) < 60


def test_ranks_that_share_a_reader_end_with_its_reason(by_rank):
    assert by_rank[0]["group"][1] == by_rank[1]["group"][1]
    assert "TooManyDrops" in by_rank[0]["group"][1]


def test_drops_of_other_ranks_count(tmp_path):
    report = DropReport(tmp_path / "drops.jsonl")
    for _ in range(100):
        report.keep()
    report.check(MAX_SHARE)
    report.tell_others([100, 50])
    with pytest.raises(TooManyDrops, match=r"50 \(0 of them here\) of 250 samples were dropped \(20.0%\)"):
        report.check(MAX_SHARE)
