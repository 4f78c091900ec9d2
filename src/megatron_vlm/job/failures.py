"""The last lines are the reason: whatever ends a command, on any rank, is said once, shortly and last.

A rank that fails writes why into its file (`ranks`); its traceback goes to `<run_dir>/errors/rankN.txt`.
Under `--nproc` the launcher speaks when all have ended; otherwise the first rank that failed by itself does.
A rank that only lost another one is silent. MEGATRON_VLM_DEBUG=1 shows every traceback.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_vlm.files import NotAFile, open_to_write, write_whole
from megatron_vlm.job import ranks, watchdog
from megatron_vlm.job.ranks import again, interrupted, say
from megatron_vlm.job.reasons import BUG_CODE, explain, is_anothers_end, is_for_users, without_traceback
from megatron_vlm.job.stops import Stopped

PATIENCE = 5.0  # seconds for which a rank that lost another waits for the other's reason
INTERRUPTED_CODE = 130

_STOPS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class _Signalled(SystemExit):
    """A signal has asked this process to end."""


class LastWords:
    """A context manager around a command: it says what ended the command, and exits with the matching code.

    The code is 2 for what a user can fix, 1 for a bug, 130 after Ctrl-C, 143 after SIGTERM, and 75 for a run
    that was asked to end early (see `stops`); under DEBUG the traceback is shown above the message. Ranks
    leave signals to their launcher.
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
        watched, before = watchdog.watch(), f"{self._name}: {_place()}"
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
        if isinstance(error, SystemExit):
            text = f"it left with sys.exit({error.code}) before the work was done; start again"
            if isinstance(error.__context__, BrokenPipeError):  # which click turns into an exit
                text = "nobody reads its output any more, as a pipe was closed; start again"
            _end("cause", int(error.code) if error.code in (1, 2) else BUG_CODE, before + text, error)
        file = _keep_traceback(error)
        if os.environ.get("MEGATRON_VLM_DEBUG"):
            traceback.print_exception(error)
        if is_anothers_end(error):
            _end_after_others(self._name, error)
        code, text = explain(error, file)
        _end("cause", code, before + text, error)


@contextlib.contextmanager
def closing(*parts: Any) -> Iterator[None]:
    """Close the parts at the end. After an error, a part that fails to close does not hide that error."""
    failed = True
    try:
        yield
        failed = False
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


# ---- how a rank ends -------------------------------------------------------------------------------------


def _end(kind: str, code: int, message: str, error: BaseException) -> NoReturn:
    """Say the message, here or to the launcher, and end this process."""
    watched, record = watchdog.watch(), _record()
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


def _end_after_others(name: str, error: BaseException) -> NoReturn:
    """Ends a rank that lost another: in silence if any rank says why, else with what this one knows."""
    record, deadline = _record(), time.monotonic() + PATIENCE
    record.write(lost=True)
    record.flush()
    gone: list[dict[str, Any]] = []
    while time.monotonic() < deadline and not gone:
        time.sleep(PATIENCE / 10)
        others = [content for content in record.others().values() if not content["lost"] or content["ended"]]
        if {content["ended"]["kind"] for content in others if content["ended"]} - {"lost", "done"}:
            watchdog.end_now(BUG_CODE)
        gone = [c for c in others if ranks.state(c) in ("", "Z") and not c["ended"]]
    who = "another rank ended without a word here; look at the logs of the other machines"
    if silent := gone or [c for c in others if ranks.state(c) == "?" and not c["ended"]]:
        one = silent[0]
        place = "" if gone else f" on {one['host']}"
        who = f"rank {one['rank']} (pid {one['pid']}{place}) ended without a word while {one['doing']}"
    said = without_traceback(str(error)).splitlines()[0]
    text = f"{who}; rank {ranks.rank()} lost it: {said}\n{again([record.content]).capitalize()}."
    _end("lost", BUG_CODE, f"{name}: {text}", error)


def _record() -> ranks.RankFile:
    watched = watchdog.watch()
    return watched.record if watched else ranks.RankFile(ranks.shared_folder())


def _tell_torchrun(message: str) -> None:
    """Writes the message in the format of torch.distributed.elastic, whose report then shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        write_whole(path, json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _place() -> str:
    """`rank 1, step 3: `, without the parts that say nothing."""
    watched = watchdog.watch()
    if watched is None:
        return ""
    rank = f"rank {ranks.rank()}" if ranks.world_size() > 1 else ""
    doing = watched.record.content["doing"]
    place = ", ".join(part for part in (rank, doing) if part not in ("", "starting"))
    return place and f"{place}: "


def _keep_traceback(error: BaseException) -> Path:
    """Writes the traceback to this rank's file in the run folder, else to a new file. Returns the path."""
    text = "".join(traceback.format_exception(error))
    watched = watchdog.watch()
    if watched is not None and (watched.owned or not is_for_users(error)):
        try:
            with open_to_write(watched.path, append=True) as file:
                file.write(text.encode(errors="backslashreplace"))
            return watched.path
        except (OSError, NotAFile):  # the disk is full, for instance
            pass
    if is_for_users(error):
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
