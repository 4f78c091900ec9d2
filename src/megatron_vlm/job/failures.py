"""The last lines are the reason: whatever ends a command, on any rank, is said once, shortly and last.

A rank that fails writes why into its file (`ranks`); its traceback goes to `<run_dir>/errors/rankN.txt`.
Under `--nproc` the launcher speaks when all have ended; otherwise the first rank that failed by itself does.
A rank that only lost another one is silent. MEGATRON_VLM_DEBUG=1 shows every traceback.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from megatron_vlm.config import ConfigError
from megatron_vlm.job import ranks, watchdog
from megatron_vlm.job.last_words import interrupted, say
from megatron_vlm.messages import printable

PATIENCE = 5.0  # seconds for which a rank that lost another waits for the other's reason
USERS_CODE, BUG_CODE, INTERRUPTED_CODE = 2, 1, 130

# what torch, gloo and NCCL say if another rank has ended
_OTHERS_END = re.compile(
    r"gloo|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|connectFullMesh|recvValue"
    r"|sendBytes|Watchdog caught collective|Failed to recv|Timed out waiting",
    re.IGNORECASE,
)
_WORKER_DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d[\d, ]*)\)")
_REMEDIES = {
    errno.ENOSPC: "make room on that disk and start again; the last complete checkpoint stays as it was",
    errno.EDQUOT: "your quota is used up: make room and start again; the last complete checkpoint stays",
    errno.EACCES: "you may not read or write there: give another path, or ask for access",
    errno.EPERM: "you may not do this there: give another path, or ask for access",
    errno.EROFS: "that file system is read-only: give another path",
    errno.EMFILE: "too many files are open: raise `ulimit -n`, or lower data.num_workers",
    errno.ENOMEM: "memory is used up: lower data.num_workers, the buffers or the batch",
    errno.EADDRINUSE: "another program listens on that port: set another MASTER_PORT",
    errno.EIO: "the disk or the network file system fails: look at `dmesg`, then start again",
    errno.ESTALE: "the network file system lost the file: start again",
}


class LastWords:
    """A context manager around a command: it says what ended the command, and exits with the matching code.

    The code is 2 for what a user can fix, 1 for a bug, 130 after Ctrl-C; under DEBUG the traceback is shown
    above the message.
    """

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        threading.excepthook = _note_of_thread
        sys.unraisablehook = _note

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        watched = watchdog.watch()
        if error is None or (isinstance(error, SystemExit) and watched is None):
            return
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 130):
            code, message = INTERRUPTED_CODE, interrupted([watched.record.content] if watched else [])
            message = message and f"{self._name}: {message}"
            _end("interrupt", code, message, error)
        if isinstance(error, SystemExit):
            text = f"it left with sys.exit({error.code}) before the work was done; start again"
            _end("cause", int(error.code) if error.code in (1, 2) else BUG_CODE, self._said(text), error)
        file = _keep_traceback(error)
        if os.environ.get("MEGATRON_VLM_DEBUG"):
            traceback.print_exception(error)
        if is_anothers_end(error):
            _end_after_others(self._name, error, file)
        code, text = explain(error, file)
        _end("cause", code, self._said(text), error)

    def _said(self, text: str) -> str:
        return f"{self._name}: {_place()}{text}"


def explain(error: BaseException, file: Path) -> tuple[int, str]:
    """(exit code, message for the user) for an error; `file` holds its traceback."""
    notes = ["", *getattr(error, "__notes__", ())]
    text = without_traceback(str(error))
    if is_worker_death(error):
        return USERS_CODE, worker_death(error)
    if isinstance(error, OSError) and error.errno is not None:
        return USERS_CODE, _os_error(error)
    if "EADDRINUSE" in text:
        return USERS_CODE, f"{text.splitlines()[0]}\n{_REMEDIES[errno.EADDRINUSE].capitalize()}."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return USERS_CODE, (
            f"out of memory: {text.splitlines()[0] if text else 'no more is to be had'}"
            + "\n".join(notes)
            + "\n"
            "Lower train.micro_batch_size, data.seq_length, data.max_pixels or a policy's max_tokens, or set "
            "model.recompute=full."
        )
    if is_for_users(error):
        return USERS_CODE, text + "\n".join(notes)
    return BUG_CODE, (
        f"{named(error)}; {_raised_in(error)}" + "\n".join(notes) + "\n"
        f"This is a bug of megatron_vlm or of a library, or damaged input; the traceback is in {file}."
    )


def is_for_users(error: BaseException) -> bool:
    """Whether the error's text was written for the user: it is a ConfigError, or our own code raised it."""
    if isinstance(error, ConfigError):
        return True
    return isinstance(error, ValueError | OSError | RuntimeError) and _raised_by_us(error)


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
    return isinstance(error, RuntimeError) and bool(_WORKER_DEATH.search(str(error)))


def worker_death(error: BaseException) -> str:
    """The message about data workers that something outside has ended."""
    found = _WORKER_DEATH.search(str(error))
    which = f" (pid {found[1]})" if found else ""
    return (
        f"data: a DataLoader worker{which} was ended from outside, most often because memory was "
        "used up (see `dmesg`); no sample is to blame.\n"
        "Lower data.num_workers or the buffers, and start again to go on from the last checkpoint."
    )


def without_traceback(text: str) -> str:
    """A message without tracebacks: workers put theirs into the text of their errors."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        return text
    after = text.rpartition(marker)[2].strip("\n").splitlines()
    kept = [number for number, line in enumerate(after) if not line.startswith((" ", "\t"))]
    return "\n".join(after[kept[0] :]) if kept else text.partition(marker)[0].strip()


def named(error: BaseException) -> str:
    """The error's type and text; for our own types only the text; for a worker's error, what it raised."""
    text, kind = without_traceback(str(error)), type(error)
    if kind.__module__.startswith("megatron_vlm."):  # the text is for users, and the class tells them nothing
        return re.sub(rf"^(\w+\.)*{kind.__name__}: ", "", text)
    return text if text != str(error) else f"{kind.__name__}: {text}"


@contextlib.contextmanager
def closing(*parts: Any) -> Iterator[None]:
    """Close the parts at the end. After an error, a part that fails to close does not hide that error."""
    failed = True
    try:
        yield
        failed = False
    finally:
        for part in parts:
            with contextlib.suppress(*((OSError, RuntimeError) if failed else ())):
                part.close()


# ---- how a rank ends -------------------------------------------------------------------------------------


def _end(kind: str, code: int, message: str, error: BaseException) -> NoReturn:
    """Say the message, here or to the launcher, and end this process."""
    watched = watchdog.watch()
    record = watched.record if watched else ranks.RankFile(ranks.shared_folder())
    record.end(kind, message, code=code)
    _tell_torchrun(message)
    if record.claim():
        say(message)
    if watched:
        watched.tidy()
    if ranks.world_size() > 1 and watched:
        watchdog.end_now(code)
    raise SystemExit(code) from error


def end_after(said: str) -> NoReturn:
    """Ends this process, from any of its threads: it waits for a rank that has failed, and that said this."""
    try:
        with contextlib.suppress(SystemExit):
            _end("cause", BUG_CODE, said, ranks.AnotherRankFailed(said))
    finally:  # also where the words cannot be written
        watchdog.end_now(BUG_CODE)


def _end_after_others(name: str, error: BaseException, file: Path) -> NoReturn:
    """Ends a rank that lost another: in silence if any rank says why, else with what this one knows."""
    watched = watchdog.watch()
    record = watched.record if watched else ranks.RankFile(ranks.shared_folder())
    deadline = time.monotonic() + PATIENCE
    gone: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        others = record.others()
        kinds = {content["ended"]["kind"] for content in others.values() if content["ended"]}
        if kinds - {"lost", "done"}:
            watchdog.end_now(BUG_CODE)
        gone = [c for c in others.values() if ranks.state(c) in ("", "Z") and not c["ended"]]
        if gone and time.monotonic() > deadline - PATIENCE / 2:
            break
        time.sleep(0.05)
    if gone:
        who = f"rank {gone[0]['rank']} (pid {gone[0]['pid']}) ended without a word while {gone[0]['doing']}"
        text = f"{who}; rank {ranks.rank()} lost it.\nStart again to go on from the last checkpoint."
    else:
        said = without_traceback(str(error)).splitlines()[0]
        text = (
            f"{_place()}lost the connection to another rank: {said}\n"
            f"Look at the other machines' logs; the traceback is in {file}."
        )
    _end("lost", BUG_CODE, f"{name}: {text}", error)


def _tell_torchrun(message: str) -> None:
    """Writes the message in the format of torch.distributed.elastic, whose report then shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _place() -> str:
    """`rank 1, step 3: `, without the parts that say nothing."""
    watched = watchdog.watch()
    if watched is None:
        return ""
    rank = [f"rank {ranks.rank()}"] if ranks.world_size() > 1 else []
    content = watched.record.content
    doing = [content["doing"]] if content["doing"] != "starting" else []
    return "".join(f"{part}, " for part in rank + doing)[:-2] + ": " if rank + doing else ""


def _os_error(error: OSError) -> str:
    watched = watchdog.watch()
    names = [printable(name) for name in (error.filename, error.filename2) if name is not None]
    doing = _raised_in(error)
    remedy = _REMEDIES.get(error.errno, "look at that path, then start again")
    where = ": " + (" → ".join(names) or doing) if names or not watched else ""
    return f"{error.strerror}{where}; {remedy}."


def _raised_in(error: BaseException) -> str:
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


def _keep_traceback(error: BaseException) -> Path:
    """Writes the traceback to this rank's file in the run folder, else to a new file. Returns the path."""
    text = "".join(traceback.format_exception(error))
    watched = watchdog.watch()
    if watched is not None and (watched.owned or not is_for_users(error)):
        try:
            with watched.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return watched.path
        except OSError:  # the disk is full, for instance
            pass
    if is_for_users(error):
        return Path(os.devnull)  # the message does not mention it
    with tempfile.NamedTemporaryFile("w", prefix="megatron-vlm-", suffix=".txt", delete=False) as file:
        file.write(text)
    return Path(file.name)


def _note_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _note(args)


def _note(args: Any) -> None:
    """Writes what fails in a thread, or while an object is deleted, to the file only: it ends nothing."""
    if os.environ.get("MEGATRON_VLM_DEBUG"):
        traceback.print_exception(args.exc_value)
    elif watchdog.watch() is not None:
        _keep_traceback(args.exc_value)
