"""The last line of every command that fails is the reason and what to do; see `exit_with_reason`.

A rank writes its reason into the error file of torch's elastic agent; `--nproc` prints the first one when all
have ended (`job.launch`). Tracebacks go to `<run_dir>/errors/rankN.txt`; MEGATRON_VLM_DEBUG=1 prints them.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_vlm.job import watchdog
from megatron_vlm.job.stops import Stopped, expect_warnings
from megatron_vlm.job.watchdog import AGAIN
from megatron_vlm.messages import PrintableText, join_lines, printable, printable_lines

BUG_CODE, USERS_CODE = 1, 2
REASON_SECONDS = 10.0  # in which a rank that fails has said why

SIGNALS = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM", 128 + signal.SIGHUP: "SIGHUP"}
# what torch, gloo and NCCL say if another rank has ended
_OTHERS_END = re.compile(
    r"gloo|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|connectFullMesh|recvValue"
    r"|sendBytes|Watchdog caught collective|Failed to recv|Timed out waiting",
    re.IGNORECASE,
)
_CAUSES = {
    signal.SIGKILL: "something outside did it, most often for want of memory (see `dmesg`)",
    signal.SIGBUS: "/dev/shm is full, or a file that it reads became shorter",
}


class AnotherRankFailed(RuntimeError):
    """This rank ends because another one ends, and that one says why."""


class _Interrupted(SystemExit):
    """A signal has asked this process to end."""


@contextlib.contextmanager
def exit_with_reason(name: str) -> Iterator[None]:
    """Run a command; print why it ends last, after its `name`, and exit with the matching code.

    The code is 2 for what a user can mend, 1 for a bug, 75 for a run that was asked to end early (see
    `job.stops`), and 128 + N for signal N, of Ctrl-C 130. Ranks leave signals to their launcher.
    """
    threading.excepthook = sys.unraisablehook = _keep_unraised
    expect_warnings()
    if "RANK" not in os.environ and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, functools.partial(_interrupt, os.getpid()))
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        if watchdog.watch() is None and not isinstance(stop, _Interrupted | Stopped):
            raise  # click ends every command by SystemExit, also after Ctrl-C
        code = stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        if isinstance(stop, Stopped):
            _end("interrupt", code, f"{name}: {stop.text}", stop)
        if code in SIGNALS:
            watched = watchdog.watch()
            step = watched.content["step"] if watched else 0
            progress = f" after step {step}; {AGAIN}" if step else ""
            _end("interrupt", code, f"{name}: stopped by {SIGNALS[code]}{progress}.", stop)
        _end("error", int(code or 1), f"{name}: {_place(stop)}it left by sys.exit({code}); {AGAIN}.", stop)
    except Exception as error:  # noqa: BLE001 - all of them are reported
        file = _keep_traceback(error)
        if not is_anothers_end(error):
            code, text = explain(error, file)
            _end("error", code, PrintableText(printable(f"{name}: {_place(error)}") + text), error)
        # the launcher ends all ranks when the first has ended: let the one speak that failed first
        limit = time.monotonic() + REASON_SECONDS
        while (watched := watchdog.watch()) and not watched.has_another_ended() and time.monotonic() < limit:
            time.sleep(0.05)
        lost = f"{name}: {_place(error)}it lost another rank: {_text_of(error)}"
        _end("lost", BUG_CODE, join_lines([lost, f"{AGAIN.capitalize()}."]), error)


@contextlib.contextmanager
def closing(*parts: Any) -> Iterator[None]:
    """Close the parts at the end. After an error, a part that fails to close does not hide that error."""
    try:
        yield
    except BaseException as error:
        if (watched := watchdog.watch()) and not hasattr(error, "doing"):
            error.doing = watched.content["doing"]  # where it came from, whatever is done while parts close
        for part in parts:
            with contextlib.suppress(Exception):
                part.close()
        raise
    for part in parts:
        part.close()


def _interrupt(owner: int, number: int, frame: Any) -> None:
    """End this process as an error would; a second signal, and one to a forked process, ends it at once."""
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != owner:
        os.kill(os.getpid(), number)
    raise _Interrupted(128 + number)


def _end(kind: str, code: int, message: str, error: BaseException) -> NoReturn:
    """Say the message, here or to the launcher, and end this process."""
    watchdog.report_end(kind, code, message, kind != "interrupt" or watchdog.rank() == 0)
    if watched := watchdog.watch():
        watched.finish()
        if watchdog.world_size() > 1:
            watchdog.end_now(code)
    raise SystemExit(code) from error


def _place(error: BaseException) -> str:
    """`rank 1, training step 3: `, without the parts that say nothing."""
    if (watched := watchdog.watch()) is None:
        return ""
    doing = getattr(error, "doing", watched.content["doing"]).removeprefix("starting")
    rank = f"rank {watchdog.rank()}" if watchdog.world_size() > 1 else ""
    place = ", ".join(filter(None, (rank, doing)))
    return place and f"{place}: "


def killed_message(who: str, number: int) -> str:
    """Return the last lines about a process that a signal has ended."""
    cause = _CAUSES.get(number, "it crashed in compiled code; its stacks are in errors/ of the run folder")
    name = f"signal {number:d} ({signal.Signals(number).name})"
    return join_lines([f"{who} was ended by {name}: {cause}.", f"{AGAIN.capitalize()}."])


# ---- what an error means -----------------------------------------------------------------------------------


def explain(error: BaseException, file: Path) -> tuple[int, PrintableText]:
    """Return (exit code, message for the user) for an error; `file` holds its traceback.

    An error that came while something was read that a user gave is about that; `inputs.attribute_errors_to`
    marks it. A bug is what remains.
    """
    notes = getattr(error, "__notes__", [])
    source = _what_was_read(error)
    # first what says all itself: our own texts, and what the disk and the memory say
    if is_worker_death(error) or is_for_users(error):
        return USERS_CODE, join_lines([_text_of(error), *notes])
    if isinstance(error, OSError) and error.errno is not None:
        paths = [str(name) for name in (error.filename, error.filename2) if name is not None]
        remedy = "make room (`df -h`)" if error.errno == errno.ENOSPC else "look at that path"
        return USERS_CODE, printable(f"{': '.join([error.strerror, *paths])}; {remedy}, then {AGAIN}.")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        fact = f"out of memory{f' while reading {source}' if source else ''}: {str(error).partition('\n')[0]}"
        less = "lower train.micro_batch_size, data.seq_length or data.max_pixels"
        return USERS_CODE, join_lines([f"{fact}; {less}, or set model.recompute=full.", *notes])
    # then what a library says: of something that was read, of a user's code, or else it is a bug
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f"; in {frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in last)
    fact, code = f"{named(error)}{place}", USERS_CODE
    if source:
        fact = f"{source} cannot be read: {fact}"
        remedy = "It is damaged, or of a kind that is not known: replace it"
    elif _raising_package(error).startswith("users_"):  # so `imports.load_object` names a user's file
        remedy = "Correct that file"
    else:
        code, remedy = BUG_CODE, "This is a bug of megatron_vlm or of a library"
    return code, join_lines([fact, *notes, f"{remedy}; the traceback is in {file}."])


def is_for_users(error: BaseException) -> bool:
    """Return whether the error's text was written for the user: its class is ours, or our code raised it."""
    if isinstance(error, OSError) and error.errno is not None:
        return False
    is_usual = isinstance(error, ValueError | OSError | RuntimeError | ImportError)
    ours = type(error).__module__.startswith("megatron_vlm.")
    return ours or is_usual and _raising_package(error).startswith("megatron_vlm")


def _what_was_read(error: BaseException) -> str:
    """The input of the user that was being read, as `inputs` marks it; empty if none was."""
    source = getattr(error, "reading", None)
    if source is None:  # what no library says of anything else
        return "a file" if isinstance(error, OSError | EOFError) else ""
    return ", ".join(map(str, source)) if isinstance(source, list) else str(source)


def is_anothers_end(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended, or does not answer."""
    if isinstance(error, AnotherRankFailed):
        return True
    if _raising_package(error).startswith("megatron_vlm") or watchdog.world_size() == 1:
        return False
    is_torchs = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (is_torchs or type(error) is RuntimeError) and bool(_OTHERS_END.search(str(error)))


def is_worker_death(error: BaseException) -> bool:
    """Return whether a data worker was killed; a signal handler of torch raises this at any point."""
    text = str(error).removeprefix("data: a ")
    return isinstance(error, RuntimeError) and text.startswith("DataLoader worker")


def without_traceback(text: str) -> str:
    """Return a worker's message without its traceback and the name of our class; another one as it is."""
    marker = "Traceback (most recent call last):"
    if marker not in text:
        return text
    after = text.rpartition(marker)[2].strip("\n").splitlines()
    unindented = [number for number, line in enumerate(after) if not line.startswith((" ", "\t"))]
    text = "\n".join(after[unindented[0] :]) if unindented else text.partition(marker)[0].strip()
    return re.sub(r"^megatron_vlm\.[\w.]+: ", "", text)


def named(error: BaseException) -> PrintableText:
    """Return the error's type and text; for our own types only the text; for a worker's, what it raised."""
    text, kind = _text_of(error), type(error)
    has_kind = not kind.__module__.startswith("megatron_vlm.") and without_traceback(str(error)) == str(error)
    return PrintableText(f"{kind.__name__}: {text}") if has_kind else text


def _text_of(error: BaseException) -> PrintableText:
    """The error's message; only one that `join_lines` made has several lines."""
    message = error.args[0] if error.args else None
    return message if isinstance(message, PrintableText) else printable(without_traceback(str(error)))


def _raising_package(error: BaseException) -> str:
    """The package, or else the module, of the function that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = frames[-1].f_globals if frames else {}
    return str(names.get("__package__") or names.get("__name__"))


def _keep_traceback(error: BaseException) -> Path:
    """Write the traceback to this rank's file in the run folder, else to a new file, and return the path."""
    text = printable_lines("".join(traceback.format_exception(error)))
    if os.environ.get("MEGATRON_VLM_DEBUG"):
        print(text, file=sys.stderr)
    watched, is_bug = watchdog.watch(), not is_for_users(error)
    if watched is not None and (watched.owns_files or is_bug):
        with contextlib.suppress(OSError):  # the disk is full, for instance
            print(text, file=watched.file, end="", flush=True)
            return watched.path
    if not is_bug:
        return Path(os.devnull)  # the message does not mention it
    with tempfile.NamedTemporaryFile("w", prefix="megatron-vlm-", suffix=".txt", delete=False) as file:
        file.write(text)
    return Path(file.name)


def _keep_unraised(args: Any) -> None:
    """Write what fails in a thread, or while an object is deleted, to the file only: it ends nothing."""
    if args.exc_value is not None and watchdog.watch() is not None:
        _keep_traceback(args.exc_value)
