"""A training run of two ranks whose processes are stopped, or killed, while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from sources import write_hf_folder, write_sharegpt

pytestmark = pytest.mark.long
STEPS = 20
HANG = 15  # seconds


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    return write_hf_folder(folder / "rows", write_sharegpt(folder / "source", 100))


def words(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> list[str]:
    return [
        *("train", "--recipe", "gemma3_tiny_digits", "tp=1", "--run_dir", str(run_dir)),
        *("--hf_path", str(checkpoint), "--dataset_type", "hf", "--train_data_path", str(dataset)),
        *("eval_every=0", f"steps={STEPS}", "num_workers=1", "micro_batch_size=2", "global_batch_size=8"),
        *("save_every=0", *settings),
    ]


def losses(run_dir: Path) -> list[float]:
    file = run_dir / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    return [json.loads(row)["loss"] for row in rows]


def wait_for_steps(run_dir: Path, runs: Callable[[], bool]) -> None:
    while len(losses(run_dir)) < 3:
        assert runs(), f"{run_dir} ended before its third step"
        time.sleep(0.1)


def workers_of(ranks: list[psutil.Process]) -> list[psutil.Process]:
    return [worker for rank in ranks for worker in rank.children()]


@dataclass
class Disturbed:
    """A job that torchrun started, and the process of its second rank to which something was done."""

    run_dir: Path
    run: subprocess.Popen
    ranks: list[psutil.Process]
    workers: list[psutil.Process]
    output: str = ""


@pytest.fixture(scope="module")
def disturbed(dataset, tiny_gemma3, tmp_path_factory) -> dict[str, Disturbed]:
    """What was done -> the job that ended of it. They mostly wait, and run beside each other."""
    jobs = {}
    for name in ("worker stopped", "worker killed"):
        run_dir = tmp_path_factory.mktemp(name.replace(" ", "_"))
        limit = [f"train.hang_seconds={HANG}"] if "stopped" in name else []
        given = words(run_dir, tiny_gemma3, dataset, "steps=100000", *limit)
        command = [sys.executable, "-m", "megatron_vlm.cli", *given, "--nproc", "2"]
        with run_dir.with_suffix(".log").open("w") as screen:
            run = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT)
        jobs[name] = Disturbed(run_dir, run, [], [])
    try:
        for name, job in jobs.items():
            wait_for_steps(job.run_dir, lambda: job.run.poll() is None)  # noqa: B023
            job.ranks = psutil.Process(job.run.pid).children()
            job.workers = workers_of(job.ranks)
            os.kill(job.workers[1].pid, signal.SIGKILL if name == "worker killed" else signal.SIGSTOP)
        for job in jobs.values():
            job.run.wait(timeout=280)
            job.output = job.run_dir.with_suffix(".log").read_text()
    finally:
        for job in jobs.values():
            job.run.terminate()  # which would go on for long; nothing to one that has ended
    return jobs


def test_a_worker_that_stays_stopped_ends_the_job(disturbed):
    job = disturbed["worker stopped"]
    assert job.run.returncode == 3 and "Traceback" not in job.output, job.output
    what, remedy = job.output.splitlines()[-2:]
    assert f"no rank came further for {HANG} s: rank 1 (pid {job.ranks[1].pid}) " in what
    assert "waits for a stopped data worker while " in what
    stacks = (job.run_dir / "errors/rank1.txt").read_text()
    assert f"pid {job.workers[1].pid}, stopped" in stacks
    assert f"The stacks of all ranks and workers are in {job.run_dir}/errors" in remedy
    assert "train" in (job.run_dir / "errors/rank0.txt").read_text()
    # a worker looks for its rank every 5 s
    _, alive = psutil.wait_procs([*job.ranks, *job.workers], timeout=30)
    assert not alive


def test_a_killed_worker_is_named_and_no_sample_is_blamed(disturbed):
    job = disturbed["worker killed"]
    assert job.run.returncode == 2 and "Traceback" not in job.output, job.output
    what, remedy = job.output.splitlines()[-2:]
    assert what.startswith("megatron-vlm: rank 1, ") and "a DataLoader worker" in what
    assert "with samples" not in job.output
    assert "want of memory" in what and remedy.startswith("Start the same command again: it goes on")
