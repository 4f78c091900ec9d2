"""Programs as they are typed, in processes forked from the one that `run_distributed` keeps with all imports.

Arguments, environment, output and exit code are a real process's; only the ten seconds of imports are shared.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from places import ROOT

from tiny.distributed import IMPORTED_ONCE, rank_environment

COMMAND = ROOT / "src/megatron_vlm/cli.py"


def run_program(
    path: Path,
    *arguments: object,
    timeout: float = 300,
    cwd: Path | str = ".",
    until: Callable[[], bool] | None = None,
    by: int = signal.SIGKILL,
    **environment: str,
) -> subprocess.CompletedProcess:
    """`python PATH ARGUMENTS...` in the folder `cwd`, with these changes to the environment. As soon as
    `until` is true, it gets the signal `by`, with all its children."""
    words = [str(path), *map(str, arguments)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory(prefix="program_") as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = context.Process(
            target=_main,
            args=(files, words, os.path.abspath(cwd), os.environ | environment, until is not None),
        )
        process.start()
        ends = time.monotonic() + timeout
        while until and process.is_alive() and time.monotonic() < ends:
            if until():
                with suppress(ProcessLookupError):  # it may just have ended
                    os.killpg(process.pid, by)
                break
            process.join(0.005)
        process.join(max(0.0, ends - time.monotonic()))
        in_time = process.exitcode is not None
        process.kill()
        process.join()
        said, errors = (file.read_text(errors="replace") for file in files)
    assert in_time, f"{words} took more than {timeout} s: {errors[-3000:]}"
    return subprocess.CompletedProcess(words, process.exitcode, said, errors)


@dataclass
class Job:
    """Ranks of one job, as torchrun would have started them, with the store at which they meet."""

    ranks: list[BaseProcess]
    log: Path  # what all of them print
    store: dist.TCPStore

    def finish(self, timeout: float = 300) -> None:
        for rank in self.ranks:
            rank.join(timeout)
        assert [rank.exitcode for rank in self.ranks] == [0] * len(self.ranks), self.log.read_text()[-4000:]


def start_ranks(count: int, path: Path, *arguments: object, log: Path) -> Job:
    """`torchrun PATH ARGUMENTS...` on so many processes, but for torchrun and the imports."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    words = [str(path), *map(str, arguments)]
    ranks = []
    for rank in range(count):
        given = os.environ | rank_environment(rank, count, store.port)
        ranks.append(context.Process(target=_main, args=([log, log], words, os.getcwd(), given, True)))
        ranks[-1].start()
    return Job(ranks, log, store)


def run_anew(
    path: Path, *arguments: object, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess:
    """The same in a process that imports for itself."""
    command, environment = [sys.executable, path, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def _main(
    files: list[Path], words: list[str], cwd: str, environment: dict[str, str], own_group: bool
) -> None:
    if own_group:
        os.setpgrp()
    for file, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # see conftest.py
    gc.collect()  # see `tiny.distributed`
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


TYPED = [sys.executable, "-m", "megatron_vlm.cli"]


OUTSIDE_TORCHRUN = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}


def ask(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**OUTSIDE_TORCHRUN, **environment}
    )


# `make test-oldest` puts the oldest supported versions there, over the packages of the environment
OLDEST = Path(os.environ.get("OLDEST_TRANSFORMERS", Path(sys.prefix) / "torch-2.11"))
OLDEST_VERSION = "5.17.0"
