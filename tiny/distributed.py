"""Run a function on several fresh gloo processes and get back what each returned.

The imports of torch, Transformers and Megatron-Core take many seconds. One server process does them once, and
every rank is a fork of it. It is still faster if one function goes through many layouts with
`parallel.setup.reset_layout`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IMPORTED_ONCE = ["megatron_vlm.training.loop", "megatron_vlm.data.load.hf", "megatron_vlm.data.load.energon"]
IMPORTED_ONCE += ["megatron_vlm.models.weights", "megatron_vlm.generation.generate"]
# what runs import on their way: rows of Hugging Face, the family of most tests, the picture of the losses
IMPORTED_ONCE += ["datasets", "megatron_vlm.models.families.gemma3"]


def run_distributed(world_size: int, fn: Callable, *args, timeout: float = 300) -> list[Any]:
    """Call `fn(*args)` on `world_size` processes with torchrun's environment; its results by rank.

    `fn` is a function at the top level of a module, `args` can be pickled, the result is plain data and
    tensors. `fn` calls `parallel.setup.init_distributed` itself. If a process fails, or `timeout` seconds
    have passed, all are killed and a RuntimeError has the output of those that failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as folder:
        processes = [
            context.Process(
                target=_rank_main, args=(folder, rank, world_size, store.port, dict(os.environ), fn, args)
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for_all(processes, Path(folder), time.monotonic() + timeout, timeout)
        finally:
            _kill(processes)
        return [torch.load(_result(folder, rank), weights_only=True) for rank in range(world_size)]


def _rank_main(
    folder: str, rank: int, world_size: int, port: int, environment: dict[str, str], fn: Callable, args: tuple
) -> None:
    os.setpgrp()  # so that what it starts dies with it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    gc.freeze()  # a worker of Energon, forked from here, looks through all else for garbage
    gc.collect()  # else the next waits for a quarter as many objects as were imported, and models stay alive
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    # the test's environment may have changed since the server started
    os.environ.update(environment | rank_environment(rank, world_size, port))
    torch.save(fn(*args), _result(folder, rank))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank; the store is at this port of the process that starts the ranks."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as with torchrun
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _die_with_parent() -> None:
    """Makes this rank end when its parent is killed, so that a killed test run leaves no rank behind."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _wait_for_all(processes: list[BaseProcess], folder: Path, deadline: float, timeout: float) -> None:
    running = list(processes)
    while running:
        if not wait([p.sentinel for p in running], max(0.0, deadline - time.monotonic())):
            ranks = [processes.index(p) for p in running]
            raise RuntimeError(
                f"run_distributed: ranks {ranks} of {len(processes)} still run after {timeout:.0f} s; raise "
                f"timeout or look for a collective that not all enter.\n{_output(folder, ranks)}"
            )
        codes = [process.exitcode for process in processes]  # read once, as it may change between two reads
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            codes = [codes[rank] for rank in failed]
            raise RuntimeError(
                f"run_distributed: ranks {failed} of {len(processes)} failed with exit codes {codes}.\n"
                f"{_output(folder, failed)}"
            )
        running = [process for process, code in zip(processes, codes, strict=True) if code is None]


def _kill(processes: list[BaseProcess]) -> None:
    """End all processes, and what they started and left behind."""
    for process in processes:
        if process.pid is None:
            continue
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the group does not exist yet, or no process is left in it
            process.kill()
        process.join()


def _output(folder: Path, ranks: list[int]) -> str:
    parts = []
    for rank in ranks:
        log = Path(_log(folder, rank))
        text = log.read_text(errors="replace") if log.exists() else "(it did not start)"
        parts.append(f"--- rank {rank} ---\n{text[-6000:]}")
    return "\n".join(parts)


def _log(folder: str | Path, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}.log")


def _result(folder: str | Path, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}.pt")
