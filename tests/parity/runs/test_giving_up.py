"""One rank that cannot go on ends all of them, soon and with its reason; drops are counted over all ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.callbacks.samples import note_samples, read_step
from megatron_vlm.config import ParallelConfig
from megatron_vlm.data.accounts.drops import DropReport, TooManyDrops
from tiny.distributed import run_distributed

MAX_SHARE = 0.1


def _batch(rank: int) -> dict:
    return {"visual_inputs": None, "__key__": [[f"of-{rank}"]]}


def _reading(drops: DropReport, rank: int, dropped_by_rank: list[int]):
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
    batches = _reading(report.with_max_share(MAX_SHARE), rank, dropped_by_rank) if broadcaster.reads else None
    for step in range(steps):
        try:
            broadcaster.take(batches, 1, report if broadcaster.reads else None)
        except ReadFailed as error:
            return step, str(error), time.monotonic() - began
    return steps, str(report.on_all_ranks(0)), time.monotonic() - began


def _not_finite(by_rank: list[list[float]], run_dir: str) -> str:
    """What this rank raises when these are the losses of its micro batches."""
    from megatron_vlm.training.step import raise_not_finite

    rank = dist.get_rank()
    reports = [{"sums": torch.tensor([loss, 9.0])} for loss in by_rank[rank]]
    micro_batches = [{"__key__": [[f"rank{rank}-{number}"]]} for number in range(len(reports))]
    try:
        raise_not_finite("the loss is nan", reports)
    except (ValueError, RuntimeError) as error:
        note_samples(error, run_dir, 7, micro_batches)
        return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])


def _all_cases() -> dict:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), 1)
    return {
        "uneven": _run(ParallelConfig(), [15, 0], 8),  # 15 % of one rank's, 7.5 % of all
        "many": _run(ParallelConfig(), [60, 0], 8),  # 15 % of all
        "group": _run(ParallelConfig(tp=2), [30], 8),
        "not finite on rank 1": _not_finite([[1.0, 2.0], [1.0, float("inf")]], "run"),
        "gradients not finite": _not_finite([[1.0], [1.0]], "run"),
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
    assert re.search(
        r"could not read a batch: \d+ of \d+ samples read so far, also ahead of training, were dropped", text
    ), text
    assert "more than data.max_drop_share = 10.0%" in text
    assert "bad_json" in text
    assert max(seconds, other_seconds) < 60


def test_the_rank_whose_loss_is_not_finite_names_those_samples(by_rank):
    other, guilty = (rank["not finite on rank 1"] for rank in by_rank)
    assert guilty.startswith("NotFinite\ntraining: the loss is nan; not finite are the losses of this rank's")
    assert "micro batches [1]." in guilty and "step 7, on this rank with samples rank1-1; look" in guilty
    assert other == "AnotherRankFailed\ntraining: the loss is nan, as rank 1 says"


def counting_worker(report: DropReport, ends: signal.Signals) -> int:
    """The id of a worker that got this signal while it held the lock that all count under."""
    holds, told = os.pipe()
    if not (worker := os.fork()):
        with report._locked():
            report._counts[0] += 1
            os.write(told, b"!")
            os.kill(os.getpid(), ends)
        os._exit(0)
    os.read(holds, 1)
    os.waitpid(worker, os.WUNTRACED)
    return worker


def test_a_worker_killed_amid_counting_leaves_counting_to_the_others():
    report = DropReport()
    counting_worker(report, signal.SIGKILL)
    report.keep()
    report.drop("a", "bad_json")
    assert report.counted() == [2, 1]


def test_a_drop_that_cannot_be_named_is_not_counted(tmp_path):
    """On a full disk, which takes the first bytes of a line; the next report begins a line of its own."""
    path = tmp_path / "drops.jsonl"
    report = DropReport(path)
    report.drop("first", "bad_json")
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, limits[1]))
    try:
        with pytest.raises(TooManyDrops, match="drops.jsonl: No space .*; .* free there; make room"):
            report.drop("second", "bad_json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert report.counted() == [0, 1]
    assert [example["key"] for example in report.examples()] == ["first"]
    following = DropReport(path)
    following.drop("third", "bad_json")
    assert [example["key"] for example in following.examples()] == ["third"]


# -- whole runs of two ranks


@pytest.fixture(scope="module")
def half_bad(tmp_path_factory):
    """Every record twice, once with an image too few."""
    source = write_sharegpt(tmp_path_factory.mktemp("half"), 150)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records = [r for r in records if r["images"]]
    broken = [r | {"images": [*r["images"], *r["images"]]} for r in records]
    source.write_text("".join(json.dumps(r) + "\n" for r in records + broken))
    return write_hf_folder(source.parent / "rows", source)


def run_to_the_end(run_dir, checkpoint, dataset, *settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_vlm.cli", "train", "--recipe", "gemma3_tiny_digits"]
    command += ["--nproc", "2", "--run_dir", str(run_dir), "--hf_path", str(checkpoint)]
    command += ["--dataset_type", "hf", "--train_data_path", str(dataset), "tp=1", "steps=20", "save_every=0"]
    command += ["micro_batch_size=2", "global_batch_size=8", "num_workers=1", "eval_every=0", *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_a_loss_that_is_not_finite_names_its_samples(half_bad, tiny_gemma3, tmp_path):
    run_dir = tmp_path / "run"
    ended = run_to_the_end(
        run_dir,
        tiny_gemma3,
        half_bad,
        "data.max_drop_share=1",
        "optimizer.lr=1e18",
        "optimizer.warmup_steps=0",
    )
    assert ended.returncode == 2, ended.stderr[-3000:]
    step = int(re.search(r"step (\d+), on this rank with samples \d{9}, ", ended.stderr)[1])
    assert f"megatron-vlm replay {run_dir} --step {step}" in ended.stderr
    rows = read_step(run_dir, step)
    assert [(row["rank"], row["micro_batch"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    speaker = int(re.search(r"megatron-vlm: rank (\d), training step", ended.stderr)[1])
    assert all(key in ended.stderr for key in next(r for r in rows if r["rank"] == speaker)["keys"][0])
