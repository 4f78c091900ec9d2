"""Lets the ranks of one job know about each other: each has a small file, which outlives it.

When the job has ended, the files tell what is said last: the reason, and in the last line the remedy.

A rank's file says what it does (`doing`; `step` is the last completed), how often it made progress (`beats`)
and how it ended (`ended`). The files lie in torchrun's own folder of this start or, if the job has several
machines, in the run folder, which all of them see.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_vlm.files import open_to_write, read_file
from megatron_vlm.messages import listed, printable_lines

ROOM = 1 << 15  # bytes reserved at the start, so that a rank can write its last word on a full disk
LONGEST_WORD = 12_000  # characters of the last word
SPOKEN = "spoken"  # the file of the rank that speaks for all
ELSEWHERE = "elsewhere"  # in torchrun's folder, a link to the folder of the ranks' files
STALE_SECONDS = 120  # a file that is older than ours by more than this is from an earlier job
LAUNCHER_SPEAKS = "MEGATRON_VLM_LAUNCHER_SPEAKS"  # the process of --nproc, set for the ranks that it starts
LOST_CODE = 1  # the exit code when a rank or a machine is lost, and nobody says why
HANG_CODE = 3  # the exit code when no rank makes progress
STACKS = "errors/ of the run folder"
AGAIN = "start again"  # the remedy of a command that keeps nothing
RUN_GOES_ON = f"{AGAIN}: a run goes on from its last checkpoint, if it has saved one"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
_WHY = dict.fromkeys(
    _FROM_OUTSIDE,
    "something outside did it, most often for want of memory (see `dmesg`); fewer data workers or smaller "
    "buffers need less",
)
_WHY[signal.SIGBUS] = "a file that it reads became shorter or cannot be read any more, or /dev/shm is full"
# torchrun sends SIGTERM to all others when one rank ends, so this counts only without another reason
_BEST_FIRST = ("hang", "cause", "interrupt", "signal", "silence", "lost", "SIGTERM")
_WORST_FIRST = ("is stopped (SIGSTOP)", "is no more", "does not answer", "hangs", "waits for other ranks")


class AnotherRankFailed(RuntimeError):
    """This rank ends because another one ends, and that one says why."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def several_machines() -> bool:
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def shared_folder(run_dir: str | Path | None = None) -> Path | None:
    """The folder of the files of this job's ranks; None if nobody else reads them, or no folder is shared."""
    if world_size() == 1 and not os.environ.get(LAUNCHER_SPEAKS):
        return None
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    torchruns = Path(error_file).parent.parent if error_file else None
    if not several_machines() or run_dir is None:
        return torchruns
    folder = Path(run_dir) / "ranks" / _job()
    if torchruns:
        with contextlib.suppress(FileExistsError):  # another rank of this machine was first
            (torchruns / ELSEWHERE).symlink_to(folder.resolve())
    return folder


class RankFile:
    """This rank's file; without a folder, it is in memory, which processes forked from this one share."""

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
            "beside": [],  # process groups that its guard ends after it
            "hang": None,
            "lost": False,  # whether it has lost another rank, and waits for that one's reason
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
    return (_stat(pid) or [""])[0]


def command_began() -> float:
    """When the user's command began, by `time.monotonic`; ranks that `--restarts` start are of the same."""
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


def _job() -> str:
    """A name that all ranks of a start share, and no two live starts: those would share a port."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")  # each machine counts restarts for itself
    return hashlib.sha256("\n".join(os.environ.get(name, "") for name in names).encode()).hexdigest()[:16]


def _path(folder: Path, number: int) -> Path:
    return folder / f"rank{number}.json"


# ---- the last words ----------------------------------------------------------------------------------------


def say(message: str) -> None:
    """Print the message, unless the launcher does it."""
    if message and not os.environ.get(LAUNCHER_SPEAKS):
        print(printable_lines(message), file=sys.stderr, flush=True)


def last_words(
    contents: dict[int, dict[str, Any]], codes: dict[int, int], otherwise: str = ""
) -> tuple[int, str]:
    """(exit code, message) for a job. `codes` are the ranks' exit codes other than 0, as their parent process
    saw them; `contents` is what the ranks said, and `otherwise` is said if neither tells a reason."""
    every = sorted({*contents, *codes})
    reasons = [_reason(f"rank {rank}", contents.get(rank), codes.get(rank, 0)) for rank in every]
    none = len(_BEST_FIRST), 0.0, LOST_CODE, otherwise
    *_, code, message = min(filter(None, reasons), key=lambda reason: reason[:2], default=none)
    return code, message


def again(contents: Iterable[dict[str, Any] | None]) -> str:
    """The remedy of the command whose ranks these are, after it did not end by itself."""
    return next((content["again"] for content in contents if content), AGAIN)


def _reason(who: str, content: dict[str, Any] | None, code: int) -> tuple[int, float, int, str] | None:
    """(place in _BEST_FIRST, time, exit code of the job, message) for a rank; None if it says nothing."""
    ended = content["ended"] if content else None
    if ended and ended["message"]:
        return _BEST_FIRST.index(ended["kind"]), ended["time"], ended.get("code", HANG_CODE), ended["message"]
    if code == 0:
        return None
    kind = "silence"
    said = f"{who} ended with code {code} and said nothing; MEGATRON_VLM_DEBUG=1 says more."
    if code < 0:
        kind = "SIGTERM" if -code == signal.SIGTERM else "signal"
        said = by_signal(who, -code, content)
        code = 128 - code
    return _BEST_FIRST.index(kind), 0.0, code, f"megatron-vlm: {said}"


def by_signal(
    who: str, number: int | None, content: dict[str, Any] | None, place: str = STACKS, remedy: str = ""
) -> str:
    """The last words of a process that a signal has ended; None: nobody knows which signal."""
    signalled = f"was ended by signal {number} ({signal.Signals(number).name})" if number else "is no more"
    doing = f" while {content['doing']}" if content else ""
    stacks = f"; its stacks are in {place}" if number not in (None, *_FROM_OUTSIDE) else ""
    why = _WHY.get(number or signal.SIGKILL, "it crashed in compiled code")
    return f"{who} {signalled}{doing}: {why}{stacks}.\n{(remedy or again([content])).capitalize()}."


def held(content: dict[str, Any], seconds: float) -> str:
    """The last words of a process that its guard ends, as its interpreter could not run for too long."""
    who = f"rank {content['rank']}" if world_size() > 1 else f"process {content['pid']}"
    where = f"{who} let no other code run for {seconds:g} s while {content['doing']}"
    return f"{where}; its stacks are in {STACKS}.\n{again([content]).capitalize()}."


def interrupted(contents: list[dict[str, Any]], by: str) -> str:
    """The line after Ctrl-C or a signal; empty after Ctrl-C if no run was active."""
    if not contents:
        return "" if by == "Ctrl-C" else f"stopped by {by}."
    step = max(content["step"] for content in contents)
    when = f"after step {step}" if step else f"while {contents[0]['doing']}"
    return f"stopped by {by} {when}; {again(contents)}."


def hung(contents: dict[int, dict[str, Any]], hang_seconds: float, errors: Path) -> str:
    """The last words of a job without progress: which rank hangs, where, and what to do."""
    hows = {number: _how(content) for number, content in sorted(contents.items())}
    worst = min(hows.values(), key=_WORST_FIRST.index)  # the other ranks only wait for these
    texts = []
    for number in (number for number, how in hows.items() if how == worst):
        content = contents[number]
        where = f", in {content['hang']['where']}" if content["hang"] else ""
        texts.append(f"rank {number} (pid {content['pid']}) {worst} while {content['doing']}{where}")
    who = listed(texts, 3, "; ")
    may_be_slow = worst in _WORST_FIRST[3:]
    remedy = "raise train.hang_seconds if it only needs longer" if may_be_slow else again(contents.values())
    return (
        f"megatron-vlm: no rank came further for {hang_seconds:g} s: {who}.\n"
        f"The stacks of all ranks and workers are in {errors}; {remedy}."
    )


def _how(content: dict[str, Any]) -> str:
    letter, hang = state(content), content["hang"]
    if letter in ("T", "", "Z"):
        return "is stopped (SIGSTOP)" if letter == "T" else "is no more"
    if hang is None:
        return "does not answer"
    return "waits for other ranks" if hang["waits"] else "hangs"
