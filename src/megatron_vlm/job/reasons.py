"""Tells the reader of an error whose it is, what it says, and the remedy."""

import contextlib
import errno
import re
import traceback
from collections.abc import Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatron_vlm.config import ConfigError
from megatron_vlm.job import ranks, watchdog
from megatron_vlm.job.ranks import AGAIN, STACKS, by_signal
from megatron_vlm.messages import printable

USERS_CODE, BUG_CODE = 2, 1

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


def explain(error: BaseException, file: Path) -> tuple[int, str]:
    """(exit code, message for the user) for an error; `file` holds its traceback.

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
    if is_for_users(error):
        return USERS_CODE, text + notes
    place = f"{named(error)}; {raised_in(error)}"
    if what:
        return USERS_CODE, (
            f"{what} cannot be read: {place}{notes}\n"
            f"It is damaged, or of a kind that is not known: replace it; the traceback is in {file}."
        )
    return BUG_CODE, (
        f"{place}{notes}\nThis is a bug of megatron_vlm or of a library; the traceback is in {file}."
    )


def is_for_users(error: BaseException) -> bool:
    """Whether the error's text was written for the user: it is a ConfigError, or our own code raised it."""
    if isinstance(error, ConfigError):
        return True
    ours = type(error).__module__.startswith("megatron_vlm.")
    return (ours or isinstance(error, ValueError | OSError | RuntimeError | ImportError)) and _raised_by_us(
        error
    )


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
    if ranks.world_size() == 1 or _raised_by_us(error):
        return False
    named = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (named or type(error) is RuntimeError) and bool(_OTHERS_END.search(str(error)))


def is_worker_death(error: BaseException) -> bool:
    """Whether torch says that a data worker was killed; a signal handler raises this at any point."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def worker_death(workers: Iterable[BaseProcess]) -> str:
    """The message about the first of these data workers that has ended; no sample is to blame."""
    workers = list(workers)
    with contextlib.suppress(RuntimeError):  # with which torch interrupts the main thread when one has ended
        ended = wait([worker.sentinel for worker in workers], timeout=5)  # its pipes close a little before,
        for worker in workers:  # and its sentinel is one, so its exit is waited for
            worker.join(5 if worker.sentinel in ended else 0)
    died = next((worker for worker in workers if worker.exitcode), None)
    which = f" (pid {died.pid})" if died else ""
    number = -died.exitcode if died and died.exitcode < 0 else None
    stacks = STACKS if watchdog.watch() else "the lines above"
    return by_signal(f"data: a DataLoader worker{which}", number, None, stacks, watchdog.again())


def without_traceback(text: str) -> str:
    """A message without tracebacks: workers put theirs into the text of their errors."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        return text
    after = text.rpartition(marker)[2].strip("\n").splitlines()
    unindented = [number for number, line in enumerate(after) if not line.startswith((" ", "\t"))]
    return "\n".join(after[unindented[0] :]) if unindented else text.partition(marker)[0].strip()


def named(error: BaseException) -> str:
    """The error's type and text; for our own types only the text; for a worker's error, what it raised."""
    text, kind = without_traceback(str(error)), type(error)
    if kind.__module__.startswith("megatron_vlm."):  # the text is for users, and the class tells them nothing
        return re.sub(rf"^(\w+\.)*{kind.__name__}: ", "", text)
    return text if text != str(error) else f"{kind.__name__}: {text}"


def _os_error(error: OSError) -> str:
    watched = watchdog.watch()
    names = [printable(name) for name in (error.filename, error.filename2) if name is not None]
    remedy = _REMEDIES.get(error.errno, "").replace(AGAIN, watchdog.again())
    remedy = remedy or f"look at that path, then {AGAIN}"
    where = ": " + (" → ".join(names) or raised_in(error)) if names or not watched else ""
    return f"{error.strerror}{where}; {remedy}."


def raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f"in {last.name} ({Path(last.filename).name}:{last.lineno})"


def _raised_by_us(error: BaseException) -> bool:
    tb = error.__traceback__
    while tb and tb.tb_next:
        tb = tb.tb_next
    package = tb.tb_frame.f_globals.get("__package__") if tb else None
    return (package or "").partition(".")[0] == "megatron_vlm"
