"""Runs the parts, each in a process of its own. The process that starts them imports no torch."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from gpu_check.parts import PARTS
from gpu_check.record import record
from gpu_check.rows import LOG_TAIL, Row, add, read, without, write_tables

LAST_LINES = 600  # characters of a log that go into the row of a part that failed


def run_all(parts: list[str], folder: Path, families: list[str], minutes: float, patience: float = 1) -> int:
    """Runs the parts one after another; 1 if a value is wrong or a part did not end well, else 0.
    A part may take `patience` times its own limit, and what earlier parts left of theirs.

    Rows of other parts that are in the folder stay, so that a check can be made in several turns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    without(folder, parts)
    about = {"date": datetime.datetime.now().isoformat(" ", "minutes")}
    began, spare = time.monotonic(), 0.0
    for name in parts:
        if time.monotonic() - began > 60 * minutes:
            add(folder, Row(name, f"was not begun: {minutes:g} minutes were over", "left out"))
            continue
        limit, started = patience * PARTS[name].seconds + spare, time.monotonic()
        problem = run_apart(name, folder, families, limit)
        took = time.monotonic() - started
        spare = max(0.0, limit - took)
        add(folder, Row(name, f"the whole part, seconds, of {limit:.0f} at most", took))
        if problem:
            add(folder, Row(name, problem, "FAILED", wrong=True))
        write_tables(folder, about, list(PARTS))
    write_tables(folder, about, list(PARTS))
    rows = [row for row in read(folder) if row.part in parts]
    wrong = [row for row in rows if row.verdict == "WRONG"]
    seconds = time.monotonic() - began
    print(f"{len(rows)} values, {len(wrong)} wrong, {seconds:.0f} s; the table: {folder}/gpu_check.md")
    print(record(folder, parts))
    return int(bool(wrong))


def run_apart(name: str, folder: Path, families: list[str], limit: float) -> str | None:
    """Runs a part in a process of its own; None, or why it did not end well. Nothing of it is left."""
    log = folder / f"{name}.log"
    words = [sys.executable, Path(__file__).parent, "--only", name, "--out", folder, "--families", *families]
    with open(log, "w") as errors:
        process = subprocess.Popen([str(word) for word in words], stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if code == 0:
        return None
    last = " ".join(log.read_text(errors="replace").split())[-LAST_LINES:]
    what = f"was ended after {limit:.0f} s" if code is None else f"ended with code {code}"
    return f"{what}; {log.name}{LOG_TAIL}{last}"


def end(process: subprocess.Popen) -> None:
    """Ends a process with all that it started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def hide_card(name: str) -> None:
    """Starts this process again without CUDA; the name of the card says that sizes are a card's."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "GPU_CHECK_CARD": name}
    os.execve(sys.executable, sys.orig_argv, os.environ | hidden)


def run_here(name: str, folder: Path, families: list[str]) -> None:
    """Runs a part in this process, which ends with code 1 and a trace if it raises."""
    import torch

    if PARTS[name].hides_cuda and torch.cuda.is_available():
        hide_card(torch.cuda.get_device_name())
    from gpu_check.sizes import About, sizes
    from megatron_vlm.config import ParallelConfig
    from megatron_vlm.parallel import setup

    torch.backends.cudnn.allow_tf32 = False  # fp32 is compared with a CPU's
    try:
        if PARTS[name].joins:
            setup.init_distributed(ParallelConfig(), seed=1)
        for row in PARTS[name].load()(sizes(), About(folder, families)):
            add(folder, row)
    except Exception:  # noqa: BLE001 - whatever ends a part is shown, also by interpreters that end badly
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of process groups do not keep a part that is done
