"""A training run of two ranks whose processes are stopped, or killed, while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from programs import COMMAND, start_ranks
from sources import write_hf_folder, write_sharegpt

pytestmark = pytest.mark.long
STEPS = 40


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


def start(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatron_vlm.cli", *words(run_dir, checkpoint, dataset, *settings)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, "--nproc", "2"], **output)


def losses(run_dir: Path) -> list[float]:
    file = run_dir / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    return [json.loads(row)["loss"] for row in rows]


def processes(run: subprocess.Popen, run_dir: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """(ranks, data workers), once some steps are done."""
    while len(losses(run_dir)) < 3:
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.1)
    ranks = psutil.Process(run.pid).children()
    return ranks, [worker for rank in ranks for worker in rank.children()]


@pytest.fixture(scope="module")
def undisturbed(dataset, tiny_gemma3, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    start_ranks(2, COMMAND, *words(run_dir, tiny_gemma3, dataset), log=run_dir / "log").finish()
    return losses(run_dir)


def test_a_rank_and_a_worker_that_are_stopped_for_a_while_change_nothing(
    undisturbed, dataset, tiny_gemma3, tmp_path
):
    run = start(tmp_path, tiny_gemma3, dataset, "train.hang_seconds=60")
    ranks, workers = processes(run, tmp_path)
    for process in (ranks[1], workers[0]):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(process.pid, signal.SIGCONT)
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    assert losses(tmp_path) == undisturbed and len(undisturbed) == STEPS


@pytest.mark.parametrize("stopped", ["rank", "worker"])
def test_one_that_stays_stopped_ends_the_job(stopped, dataset, tiny_gemma3, tmp_path):
    run = start(tmp_path, tiny_gemma3, dataset, "train.hang_seconds=15", "steps=100000")
    ranks, workers = processes(run, tmp_path)
    process = ranks[1] if stopped == "rank" else workers[1]
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 3 and "Traceback" not in output, output
    what, remedy = output.splitlines()[-2:]
    assert f"no rank came further for 15 s: rank 1 (pid {ranks[1].pid}) " in what
    if stopped == "worker":
        assert f"pid {process.pid}, state T" in (tmp_path / "errors/rank1.txt").read_text()
    assert f"The stacks of all ranks and workers are in {tmp_path}/errors" in remedy
    assert "train" in (tmp_path / "errors/rank0.txt").read_text()
    _, alive = psutil.wait_procs([*ranks, *workers], timeout=30)  # a worker looks for its rank every 5 s
    assert not alive
    print(f"{stopped} stopped: over after {time.monotonic() - began:.0f} s")


def test_a_killed_worker_is_named_and_no_sample_is_blamed(dataset, tiny_gemma3, tmp_path):
    run = start(tmp_path, tiny_gemma3, dataset, "steps=100000")
    _, workers = processes(run, tmp_path)
    os.kill(workers[1].pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 2 and "Traceback" not in output, output
    what, remedy = output.splitlines()[-2:]
    assert what.startswith("megatron-vlm: rank 1, ") and "a DataLoader worker" in what
    assert "with samples" not in output
    assert "want of memory" in what and remedy.startswith(
        "Start again: a run goes on from its last checkpoint"
    )
