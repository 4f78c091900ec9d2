"""A job of two ranks without a model, to fail in: each step is an all-reduce, one rank does as it is told.

python -m small_job RUN_DIR FAULT [--hang-seconds S] [--rank R] [--alone] [--restarts N]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import typer

from megatron_vlm.cli import run, single
from megatron_vlm.config import ConfigError
from megatron_vlm.job import watchdog
from megatron_vlm.job.errors import closing

STEPS, FAILS_IN = 4, 3


def job(
    run_dir: Path, fault: str, hang_seconds: float = 60, rank: int = 1, alone: bool = False, restarts: int = 0
) -> None:
    if not alone and "RANK" not in os.environ:
        given = [str(run_dir), fault, f"--hang-seconds={hang_seconds}", f"--rank={rank}"]
        from megatron_vlm.job.launch import launch

        raise typer.Exit(launch(2, given, "small_job", restarts))
    if fault == "config":
        raise ConfigError("train.steps: 0 is less than 1.")
    with watchdog.watching(run_dir / "errors", hang_seconds):
        if fault == "before" and watchdog.rank() == rank:
            time.sleep(10_000)
        import torch
        import torch.distributed as dist

        one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("gloo", **one)
        total = torch.ones(1)
        reader = ThreadPool(1)  # as `feed` reads

        def one_step(step: int) -> None:
            if step == FAILS_IN and watchdog.rank() == rank:
                FAULTS[fault](run_dir)
            dist.all_reduce(total)

        with closing(Closes(run_dir)):
            for step in range(1, STEPS + 1):
                watchdog.beat(f"training step {step}")
                reader.apply(one_step, (step,)) if fault == "data" else one_step(step)
                watchdog.beat(step=step)
        # in one write: PYTHONUNBUFFERED makes two of a print, between which another rank may write
        os.write(1, f"rank {watchdog.rank()} sums {total.item():g}\n".encode())
        dist.destroy_process_group()


class Closes:
    """As the run's logger: closing fails, too, on a full disk."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir

    def close(self) -> None:
        if (self._run_dir / "full").exists():
            raise OSError(28, "No space left on device")


def full_disk(run_dir: Path) -> None:
    (run_dir / "full").touch()
    watchdog.beat(f"saving step {FAILS_IN} in {run_dir}")
    raise OSError(28, "No space left on device")


def kill_once(run_dir: Path) -> None:
    if not (run_dir / "killed").exists():
        (run_dir / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> None:
    """Have a process outside stop this one, and continue it `seconds` after it has seen it stopped."""
    pid = os.getpid()
    is_running = f"kill -0 {pid} && ! grep -q '^State:.T' /proc/{pid}/status"
    steps = f"kill -STOP {pid}; while {is_running}; do sleep 0.1; done; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", steps], start_new_session=True).wait()


class Sleeps:
    """A dataset whose first item never comes."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        time.sleep(10_000)


def wait_for_data() -> None:
    from torch.utils.data import DataLoader

    watchdog.beat(f"waiting for the data of step {FAILS_IN}")
    next(iter(DataLoader(Sleeps(), num_workers=1)))


def hang_in_files(doing: str) -> None:
    watchdog.beat(doing)
    time.sleep(10_000)


def spin() -> None:
    while True:
        pass


FAULTS = {
    "none": lambda _: None,
    "value": lambda _: int("x"),
    "type": lambda _: len(3),
    "path": lambda _: Path("/no/such\x1b[31mfile").read_text(),
    "full": full_disk,
    "exit": lambda _: sys.exit(0),
    "os_exit_7": lambda _: os._exit(7),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill_once": kill_once,
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt launcher": lambda _: (os.kill(os.getppid(), signal.SIGINT), time.sleep(10_000)),
    "terminate launcher": lambda _: (os.kill(os.getppid(), signal.SIGTERM), time.sleep(10_000)),
    "hang": lambda _: time.sleep(10_000),
    "spin": lambda _: spin(),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "data": lambda _: wait_for_data(),
    "save": lambda _: hang_in_files(f"saving step {FAILS_IN}"),
    "pause": lambda _: stop_for(5),
}

if __name__ == "__main__":
    run(single(job), "megatron-vlm")
