"""Lets the ranks of one job see each other: each has a small file with its heartbeat.

A rank's file says what it does (`doing`; `step` is the last completed), how often it made progress (`beats`),
when its watchdog last looked, and how it ended. The files lie in torchrun's folder of this start or, if the
job has several machines, in the run folder, which all of them see. Why a rank ended goes through torchrun's
error file, see `tell`.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.files import open_to_write, read_file, write_whole
from megatron_vlm.messages import printable, printable_lines

ROOM = 1 << 13  # bytes reserved at the start, so that a rank can write on a full disk
SPOKEN = "spoken"  # the file of the rank that speaks for all, where no launcher does
SHARED = "shared"  # in torchrun's folder, a link to the folder of the ranks' files
STALE_SECONDS = 120  # a file that is older than ours by more than this is from an earlier job
LAUNCHER_SPEAKS = "MEGATRON_VLM_LAUNCHER_SPEAKS"  # the process of --nproc, set for the ranks that it starts
AGAIN = "start again"  # the remedy of a command that keeps nothing
RUN_GOES_ON = f"{AGAIN}: a run goes on from its last checkpoint, if it has saved one"


class AnotherRankFailed(RuntimeError):
    """This rank ends because another one ends, and that one says why."""


def from_environment(name: str, default: int) -> int:
    """Return a number that a launcher sets. Raises ConfigError for what is no number from 0 on."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}: {printable(text)!r} is no number; unset it, or let a launcher set it.")
    return int(text)


def rank() -> int:
    return from_environment("RANK", 0)


def world_size() -> int:
    return from_environment("WORLD_SIZE", 1)


def several_machines() -> bool:
    return world_size() > from_environment("LOCAL_WORLD_SIZE", world_size())


def shared_folder(run_dir: str | Path) -> Path | None:
    """Return the folder of the files of this job's ranks; None for a single process, or if none is shared."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    torchruns = Path(error_file).parent.parent if error_file else None
    if not several_machines():
        return torchruns
    # ranks of a start share this name and no two live starts do: those would share a port
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    job = hashlib.sha256("\n".join(os.environ.get(name, "") for name in names).encode()).hexdigest()[:16]
    folder = Path(run_dir) / "ranks" / job
    if torchruns:
        with contextlib.suppress(FileExistsError):  # another rank of this machine was first
            (torchruns / SHARED).symlink_to(folder.resolve())
    return folder


class RankFile:
    """This rank's file; without a folder, its content is in memory alone."""

    def __init__(self, folder: Path | None, again: str = AGAIN):
        self.folder = folder
        self.content: dict[str, Any] = {
            "rank": rank(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "doing": "starting",
            "step": 0,
            "beats": 0,
            "looked": time.time(),  # when the watchdog last did
            "heeds": False,  # whether SIGTERM asks it to save and end, see `stops`
            "again": again,  # what to do if it did not end by itself
            "hang": None,
            "ended": None,
        }
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if rank() == 0:
                (folder / SPOKEN).unlink(missing_ok=True)
            self._file = open_to_write(folder / f"rank{rank()}.json", buffering=0)
            os.pwrite(self._file.fileno(), b" " * ROOM, 0)
            self._started = os.fstat(self._file.fileno()).st_mtime
        self.write()

    def write(self, **news: Any) -> None:
        """Change some of the content. It takes some ten microseconds, and others see all of it at once."""
        with self._lock:  # the watchdog's thread writes, too
            self.content |= news
            if self.folder is not None:
                os.pwrite(self._file.fileno(), json.dumps(self.content).encode() + b"\n", 0)

    def flush(self) -> None:
        """Make the content visible to other machines."""
        if self.folder is not None:
            os.fsync(self._file.fileno())

    def others(self) -> dict[int, dict[str, Any]]:
        """Return the content of the other ranks' files, for those that have one."""
        if self.folder is None:
            return {}
        contents = read_all(self.folder, world_size(), self._started - STALE_SECONDS)
        contents.pop(rank(), None)
        return contents

    def forget_earlier_jobs(self) -> None:
        """Remove what earlier jobs left in the run folder; only after this job has claimed it."""
        if self.folder is not None and several_machines() and rank() == 0:
            for folder in self.folder.parent.iterdir():
                if folder != self.folder:
                    shutil.rmtree(folder, ignore_errors=True)

    def is_first_to_speak(self) -> bool:
        """Return True for the first rank that asks, once in a job."""
        try:
            if self.folder is not None:
                open_to_write(self.folder / SPOKEN, new=True).close()
        except FileExistsError:
            return False
        return True


def read_all(folder: Path, count: int, not_before: float = 0.0) -> dict[int, dict[str, Any]]:
    """Return rank → content of its file in `folder`, for files that can be read now."""
    contents = {}
    for number in range(count):
        path = folder / f"rank{number}.json"
        # one that does not exist yet, or is being written, comes with the next look
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            if path.stat().st_mtime >= not_before:
                contents[number] = json.loads(read_file(path).partition(b"\n")[0])
    return contents


def tell(kind: str, code: int, message: str, record: RankFile | None) -> None:
    """Say why this rank ends: to its launcher through torchrun's error file, or else on the screen.

    `kind` is cause, hang, interrupt or lost. torchrun's own report shows the message, too.
    """
    if record is not None and record.content["ended"] is None:
        record.write(ended=kind)
        record.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()
        extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now, "kind": kind, "code": code}
        with contextlib.suppress(OSError):  # the disk is full, or torchrun has removed its folder
            write_whole(path, json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if message and not os.environ.get(LAUNCHER_SPEAKS) and (record is None or record.is_first_to_speak()):
        print(printable_lines(message), file=sys.stderr, flush=True)


def state(content: dict[str, Any]) -> str:
    """Return the kernel's letter for a rank: R, S, D, T (stopped), Z; empty if it is gone, "?" if it is on
    another machine."""
    return process_state(content["pid"]) if content["host"] == socket.gethostname() else "?"


def process_state(pid: int) -> str:
    """Return the letter of `state` for a process of this machine."""
    return (_stat(pid) or [""])[0]


def command_began() -> float:
    """Return when the user's command began, by `time.monotonic`, also for ranks that `--restarts` started."""
    ticks = int(_stat(int(os.environ.get(LAUNCHER_SPEAKS, os.getpid())))[19])  # since the machine was booted
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def _stat(pid: int) -> list[str]:
    """A process's fields of proc_pid_stat(5), from its letter on; none if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return stat.rpartition(")")[2].split()
