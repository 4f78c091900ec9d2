"""Lets the ranks of one job know about each other: each has a small file, which outlives it.

A rank's file says what it does (`doing`; `step` is the last completed), how often it made progress (`beats`)
and how it ended (`ended`). The files lie in torchrun's own folder of this start or, if the job has several
machines, in the run folder, which all of them see.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megatron_vlm.files import open_to_write, read_file

ROOM = 1 << 15  # bytes reserved at the start, so that a rank can write its last word on a full disk
LONGEST_WORD = 12_000  # characters of the last word
SPOKEN = "spoken"  # the file of the rank that speaks for all
STALE_SECONDS = 120  # a file that is older than ours by more than this is from an earlier job


class AnotherRankFailed(RuntimeError):
    """This rank ends because another one ends, and that one says why."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def several_machines() -> bool:
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def shared_folder(run_dir: str | Path | None = None) -> Path | None:
    """The folder of the files of this job's ranks; None if there are no other ranks, or no shared folder."""
    if world_size() == 1:
        return None
    if several_machines() and run_dir is not None:
        return Path(run_dir) / "ranks" / _job()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent if error_file else None


class RankFile:
    """This rank's file; without a folder, it is in memory, which processes forked from this one share."""

    def __init__(self, folder: Path | None, hang_seconds: float = float("inf")):
        self.folder = folder
        self.content: dict[str, Any] = {
            "rank": rank(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "doing": "starting",
            "step": 0,
            "beats": 0,
            "looked": time.time(),  # when the watchdog last did
            "hang_seconds": hang_seconds,
            "hang": None,
            "ended": None,
        }
        self._writing = threading.Lock()
        if folder is None:
            self._file = os.memfd_create("rank")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            if rank() == 0 and several_machines():  # torchrun's own folder is new at every start
                (folder / SPOKEN).unlink(missing_ok=True)
            self._opened = open_to_write(_path(folder, rank()), buffering=0)
            self._file = self._opened.fileno()
            os.pwrite(self._file, b" " * ROOM, 0)
            self._started = os.fstat(self._file).st_mtime
        self.write()

    def write(self, **news: Any) -> None:
        """Change some of the content. It takes some ten microseconds, and others see all of it at once."""
        with self._writing:  # the watchdog's thread writes, too
            self.content |= news
            os.pwrite(self._file, json.dumps(self.content).encode() + b"\n", 0)

    def read(self) -> dict[str, Any]:
        """The content as the process that writes it has left it."""
        return json.loads(os.pread(self._file, ROOM, 0).partition(b"\n")[0])

    def end(self, kind: str, message: str, **more: Any) -> None:
        """Write the last word; nothing written later changes it."""
        if self.content["ended"] is None:
            ended = {"kind": kind, "message": message[:LONGEST_WORD], "time": time.time(), **more}
            self.write(ended=ended)
            self.flush()

    def flush(self) -> None:
        """Make the content visible to other machines."""
        os.fsync(self._file)

    def others(self) -> dict[int, dict[str, Any]]:
        """The content of the other ranks' files, for those that have one."""
        if self.folder is None:
            return {}
        found = read_all(self.folder, world_size(), self._started - STALE_SECONDS)
        found.pop(rank(), None)
        return found

    def forget_earlier_jobs(self) -> None:
        """Remove what earlier jobs left in the run folder; only after this job has claimed it."""
        if self.folder is not None and several_machines() and rank() == 0:
            for folder in self.folder.parent.iterdir():
                if folder != self.folder:
                    shutil.rmtree(folder, ignore_errors=True)

    def claim(self) -> bool:
        """Whether this rank speaks for all: True for the first rank that asks, once in a job."""
        if self.folder is None:
            return True
        try:
            open_to_write(self.folder / SPOKEN, new=True).close()
        except FileExistsError:
            return False
        return True


def read_all(folder: Path, count: int, not_before: float = 0.0) -> dict[int, dict[str, Any]]:
    """Rank → content of its file in `folder`, for files that can be read now."""
    found = {}
    for number in range(count):
        path = _path(folder, number)
        try:
            if path.stat().st_mtime >= not_before:
                found[number] = json.loads(read_file(path).partition(b"\n")[0])
        except (FileNotFoundError, json.JSONDecodeError):  # does not exist yet, or is being written
            continue
    return found


def state(content: dict[str, Any]) -> str:
    """The kernel's letter for a rank on this machine: R, S, D, T (stopped), Z; empty if it is gone, "?" if it
    is on another machine."""
    return process_state(content["pid"]) if content["host"] == socket.gethostname() else "?"


def process_state(pid: int) -> str:
    """The letter of `state` for a process of this machine."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def _job() -> str:
    """A name that all ranks of a start share, and no two live starts: those would share a port."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return hashlib.sha256("\n".join(os.environ.get(name, "") for name in names).encode()).hexdigest()[:16]


def _path(folder: Path, number: int) -> Path:
    return folder / f"rank{number}.json"
