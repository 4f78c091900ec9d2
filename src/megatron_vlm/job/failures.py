"""The last lines are the reason: what ends a command, on any rank, is said once, shortly and last.

A rank that fails writes why into torchrun's error file; its traceback goes to `<run_dir>/errors/rankN.txt`.
Under `--nproc` the launcher speaks when all have ended; otherwise the first rank that failed by itself does.
MEGATRON_VLM_DEBUG=1 shows every traceback.
"""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from megatron_vlm.config import ConfigError
from megatron_vlm.files import NotAFile, open_to_write
from megatron_vlm.job import ranks, watchdog
from megatron_vlm.job.stops import Stopped
from megatron_vlm.messages import mask_addresses, printable

BUG_CODE, USERS_CODE, INTERRUPTED_CODE = 1, 2, 130
PATIENCE = 5.0  # seconds for which a rank that lost another waits for the other's reason
OUT_OF_MEMORY = "most often for want of memory (see `dmesg`); fewer data workers or smaller buffers need less"

_STOPS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# what torch, gloo and NCCL say if another rank has ended
_OTHERS_END = re.compile(
    r"gloo|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|connectFullMesh|recvValue"
    r"|sendBytes|Watchdog caught collective|Failed to recv|Timed out waiting",
    re.IGNORECASE,
)
_MEMORY_REMEDY = (
    "Lower train.micro_batch_size, data.seq_length, data.max_pixels, a policy's max_tokens or evaluate's "
    "--batch-size, or set model.recompute=full."
)
_REMEDIES = {
    errno.ENOSPC: "make room on that disk and start again",
    errno.EFBIG: "the limit of a file's size is reached: raise `ulimit -f` and start again",
    errno.EDQUOT: "your quota is used up: make room and start again",
    errno.EACCES: "you may not read or write there: give another path, or ask for access",
    errno.EROFS: "that file system is read-only: give another path",
    errno.EMFILE: "too many files are open: raise `ulimit -n`, or lower data.num_workers",
    errno.ENOMEM: "memory is used up: lower data.num_workers, the buffers or the batch",
    errno.EADDRINUSE: "another program listens on that port: set another MASTER_PORT",
    errno.EIO: "the disk or the network file system fails: look at `dmesg`, then start again",
}


class _Signalled(SystemExit):
    """A signal has asked this process to end."""


class LastWords:
    """A context manager around a command: it says what ended the command, and exits with the matching code.

    The code is 2 for what a user can fix, 1 for a bug, 130 after Ctrl-C, 143 after SIGTERM, and 75 for a run
    that was asked to end early (see `stops`). Ranks leave signals to their launcher.
    """

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        threading.excepthook = sys.unraisablehook = _note
        if "RANK" not in os.environ and threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                    signal.signal(number, functools.partial(_stop, os.getpid()))

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        watched = watchdog.watch()
        if isinstance(error, Stopped):
            _end("interrupt", error.code, f"{self._name}: {error.text}", error)
        code = error.code if isinstance(error, SystemExit) else INTERRUPTED_CODE
        by = _STOPS.get(code - 128) if isinstance(code, int) else None
        made_by_typer = isinstance(error, SystemExit) and code == INTERRUPTED_CODE  # of a KeyboardInterrupt
        if by and (made_by_typer or isinstance(error, KeyboardInterrupt | _Signalled)):
            message = interrupted([watched.record.content] if watched else [], by)
            _end("interrupt", code, message and f"{self._name}: {message}", error)
        if error is None or (isinstance(error, SystemExit) and watched is None):
            return
        before = f"{self._name}: {_place(error)}"
        if isinstance(error, SystemExit):
            text = f"it left with sys.exit({error.code}) before the work was done; start again"
            if isinstance(error.__context__, BrokenPipeError):  # which click turns into an exit
                text = "nobody reads its output any more, as a pipe was closed; start again"
            _end("cause", int(error.code) if error.code in (1, 2) else BUG_CODE, before + text, error)
        file = _keep_traceback(error)
        if os.environ.get("MEGATRON_VLM_DEBUG"):
            traceback.print_exception(error)
        if is_anothers_end(error):
            lost = f"it lost another rank: {without_traceback(str(error)).splitlines()[0]}"
            _leave_the_reason_to_others()
            _end("lost", BUG_CODE, f"{before}{lost}\n{watchdog.again().capitalize()}.", error)
        code, text = explain(error, file)
        _end("cause", code, before + text, error)


@contextlib.contextmanager
def closing(*parts: Any) -> Iterator[None]:
    """Close the parts at the end. After an error, a part that fails to close does not hide that error, and
    what it does meanwhile is not where the error came from."""
    failed = True
    try:
        yield
        failed = False
    except BaseException as error:
        if (watched := watchdog.watch()) and not hasattr(error, "doing"):
            error.doing = watched.record.content["doing"]
        raise
    finally:
        for part in parts:
            with contextlib.suppress(OSError, RuntimeError) if failed else contextlib.nullcontext():
                part.close()


def _stop(owner: int, number: int, frame: Any) -> None:
    """Ends this process as an error would, with the code that a shell gives the signal; a second signal, and
    one to a process that was forked from it, ends at once."""
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != owner:
        os.kill(os.getpid(), number)
    raise _Signalled(128 + number)


def _end(kind: str, code: int, message: str, error: BaseException) -> NoReturn:
    """Say the message, here or to the launcher, and end this process."""
    watched = watchdog.watch()
    ranks.tell(kind, code, message, watched and watched.record)
    if watched:
        watched.tidy()
        if ranks.world_size() > 1:
            watchdog.end_now(code)
    raise SystemExit(code) from error


def _leave_the_reason_to_others() -> None:
    """Ends a rank that lost another in silence if any rank says why; its launcher would choose itself."""
    watched = watchdog.watch()
    deadline = time.monotonic() + PATIENCE
    while watched and not os.environ.get(ranks.LAUNCHER_SPEAKS) and time.monotonic() < deadline:
        if {content["ended"] for content in watched.record.others().values()} - {None, "lost", "done"}:
            watchdog.end_now(BUG_CODE)
        time.sleep(PATIENCE / 10)


def _place(error: BaseException) -> str:
    """`rank 1, training step 3: `, without the parts that say nothing."""
    watched = watchdog.watch()
    if watched is None:
        return ""
    rank = f"rank {ranks.rank()}" if ranks.world_size() > 1 else ""
    doing = getattr(error, "doing", watched.record.content["doing"])
    place = ", ".join(part for part in (rank, doing) if part not in ("", "starting"))
    return place and f"{place}: "


def interrupted(contents: list[dict[str, Any]], by: str) -> str:
    """Return the line after Ctrl-C or a signal; empty after Ctrl-C if no run was active."""
    if not contents:
        return "" if by == "Ctrl-C" else f"stopped by {by}."
    step = max(content["step"] for content in contents)
    when = f"after step {step}" if step else f"while {contents[0]['doing']}"
    return f"stopped by {by} {when}; {contents[0]['again']}."


def by_signal(who: str, number: int | None, again: str, doing: str = "") -> str:
    """Return the last lines about a process that a signal has ended; None: nobody knows which signal."""
    when = f" while {doing}" if doing else ""
    number = number or signal.SIGKILL
    why = "it crashed in compiled code; its stacks are in errors/ of the run folder"
    if number in (signal.SIGKILL, signal.SIGTERM):
        why = f"something outside did it, {OUT_OF_MEMORY}"
    if number == signal.SIGBUS:
        why = "a file that it reads became shorter or cannot be read any more, or /dev/shm is full"
    name = f"signal {number:d} ({signal.Signals(number).name})"
    return f"{who} was ended by {name}{when}: {why}.\n{again.capitalize()}."


# ---- what an error means -----------------------------------------------------------------------------------


def explain(error: BaseException, file: Path) -> tuple[int, str]:
    """Return (exit code, message for the user) for an error; `file` holds its traceback.

    An error that came while something was read that a user gave is about that (see `messages.reading`), and
    a bug is what remains.
    """
    notes = "\n".join(["", *getattr(error, "__notes__", ())])
    text, what = without_traceback(str(error)), _what_was_read(error)
    # from the surest sign of what it is to the weakest: only what nothing here explains is a bug
    if is_worker_death(error):
        return USERS_CODE, text if _raised_by_us(error) else f"{text}\n{watchdog.again().capitalize()}."
    if isinstance(error, OSError) and error.errno is not None:
        return USERS_CODE, _os_error(error)
    if "EADDRINUSE" in text:
        return USERS_CODE, f"{text.splitlines()[0]}\n{_REMEDIES[errno.EADDRINUSE].capitalize()}."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return USERS_CODE, (
            f"out of memory{f' while reading {what}' if what else ''}: "
            f"{text.splitlines()[0] if text else 'no more is to be had'}{notes}\n"
            + (f"Make {what} smaller, or give it more memory." if what else _MEMORY_REMEDY)
        )
    if _is_for_users(error):
        return USERS_CODE, text + notes
    place = f"{named(error)}; {_raised_in(error)}"
    if what:
        return USERS_CODE, (
            f"{what} cannot be read: {place}{notes}\n"
            f"It is damaged, or of a kind that is not known: replace it; the traceback is in {file}."
        )
    return BUG_CODE, (
        f"{place}{notes}\nThis is a bug of megatron_vlm or of a library; the traceback is in {file}."
    )


def _is_for_users(error: BaseException) -> bool:
    """Whether the error's text was written for the user: it is a ConfigError, or our own code raised it."""
    ours = type(error).__module__.startswith("megatron_vlm.")
    is_usual = isinstance(error, ValueError | OSError | RuntimeError | ImportError)
    return isinstance(error, ConfigError) or ((ours or is_usual) and _raised_by_us(error))


def _what_was_read(error: BaseException) -> str:
    """The input of the user that was being read, as `messages.reading` notes it; empty if none was."""
    what = getattr(error, "reading", None)
    if what is None:  # what no library says of anything else
        return "a file" if isinstance(error, OSError | EOFError) else ""
    return ", ".join(map(printable, what)) if isinstance(what, list) else printable(what)


def is_anothers_end(error: BaseException) -> bool:
    """Whether the error only says that another rank has ended, or does not answer."""
    if isinstance(error, ranks.AnotherRankFailed):
        return True
    if _raised_by_us(error) or ranks.world_size() == 1:
        return False
    is_torchs = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (is_torchs or type(error) is RuntimeError) and bool(_OTHERS_END.search(str(error)))


def is_worker_death(error: BaseException) -> bool:
    """Whether torch says that a data worker was killed; a signal handler raises this at any point."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def worker_death(workers: Iterable[BaseProcess]) -> str:
    """Return the message about the first of these data workers that has ended; no sample is to blame."""
    workers = list(workers)
    with contextlib.suppress(RuntimeError):  # with which torch interrupts the main thread when one has ended
        ended = wait([worker.sentinel for worker in workers], timeout=5)  # its pipes close a little before,
        for worker in workers:  # and its sentinel is one, so its exit is waited for
            worker.join(5 if worker.sentinel in ended else 0)
    died = next((worker for worker in workers if worker.exitcode), None)
    which = f" (pid {died.pid})" if died else ""
    number = -died.exitcode if died and died.exitcode < 0 else None
    return by_signal(f"data: a DataLoader worker{which}", number, watchdog.again())


def without_traceback(text: str) -> str:
    """Return a message without tracebacks: workers put theirs into the text of their errors."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        return text
    after = text.rpartition(marker)[2].strip("\n").splitlines()
    unindented = [number for number, line in enumerate(after) if not line.startswith((" ", "\t"))]
    return "\n".join(after[unindented[0] :]) if unindented else text.partition(marker)[0].strip()


def named(error: BaseException) -> str:
    """Return the error's type and text; for our own types only the text; for a worker's, what it raised."""
    text, kind = without_traceback(str(error)), type(error)
    if kind.__module__.startswith("megatron_vlm."):  # the text is for users, and the class tells them nothing
        return re.sub(rf"^(\w+\.)*{kind.__name__}: ", "", text)
    return text if text != str(error) else f"{kind.__name__}: {text}"


def _os_error(error: OSError) -> str:
    watched = watchdog.watch()
    names = [printable(name) for name in (error.filename, error.filename2) if name is not None]
    remedy = _REMEDIES.get(error.errno, f"look at that path, then {ranks.AGAIN}")
    if error.errno == errno.ENOSPC and not names:
        remedy = remedy.replace("that disk", "that disk (`df -h`; /dev/shm counts, too)")
    where = ": " + (" → ".join(names) or _raised_in(error)) if names or not watched else ""
    return f"{error.strerror}{where}; {remedy.replace(ranks.AGAIN, watchdog.again())}."


def _raised_in(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f"in {frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in last)


def _raised_by_us(error: BaseException) -> bool:
    tb = error.__traceback__
    while tb and tb.tb_next:
        tb = tb.tb_next
    package = tb.tb_frame.f_globals.get("__package__") if tb else None
    return (package or "").partition(".")[0] == "megatron_vlm"


def _keep_traceback(error: BaseException) -> Path:
    """Writes the traceback to this rank's file in the run folder, else to a new file. Returns the path."""
    text = mask_addresses("".join(traceback.format_exception(error)))
    watched = watchdog.watch()
    is_for_users = _is_for_users(error)
    if watched is not None and (watched.owned or not is_for_users):
        with contextlib.suppress(OSError, NotAFile):  # the disk is full, for instance
            with open_to_write(watched.path, append=True) as file:
                file.write(text.encode(errors="backslashreplace"))
            return watched.path
    if is_for_users:
        return Path(os.devnull)  # the message does not mention it
    with tempfile.NamedTemporaryFile("w", prefix="megatron-vlm-", suffix=".txt", delete=False) as file:
        file.write(text)
    return Path(file.name)


def _note(args: Any) -> None:
    """Writes what fails in a thread, or while an object is deleted, to the file only: it ends nothing."""
    if args.exc_value is None:
        return
    if os.environ.get("MEGATRON_VLM_DEBUG"):
        traceback.print_exception(args.exc_value)
    elif watchdog.watch() is not None:
        _keep_traceback(args.exc_value)
