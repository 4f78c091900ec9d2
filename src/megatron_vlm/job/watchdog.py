"""Ends a job in which no rank makes progress for `train.hang_seconds`, with the stacks of all ranks.

Code that can take long calls `beat`. Each rank writes its beats into a small file, and a thread of each rank
reads the files of all: in torchrun's folder or, over several machines, in `<errors>`. If no rank made
progress, each writes the stacks of its threads and data workers to `<errors>/rankN.txt`, the last line names
the rank that hangs, and all end.

A rank that was stopped (SIGSTOP, Ctrl-Z) and continues in time goes on: the time in which it did not run does
not count. `kill -USR2 PID` writes a rank's stacks at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megatron_vlm.files import atomic_write, open_to_write, read_file
from megatron_vlm.messages import QUIET, join_lines, listed, printable

HANG_CODE = 3  # the exit code when no rank makes progress
LAUNCHER = "MEGATRON_VLM_LAUNCHER"  # the process id of `--nproc`, set for the ranks that it starts
AGAIN = "start the same command again: it goes on from what is saved"
WAITING = re.compile("torch/distributed/|megatron/core/(distributed|pipeline_parallel|tensor_parallel)/")
WAITS = "waits for other ranks"
IS_STOPPED = "is stopped"
WORKER_STOPPED = "waits for a stopped data worker"
MUCH_IO = 1 << 21  # bytes read or written per second that count as a beat
ROOM = 1 << 12  # bytes of a rank's file, reserved at the start for a disk that fills up

_watch: Watch | None = None


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def has_several_machines() -> bool:
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


@contextlib.contextmanager
def watching(errors: str | Path, hang_seconds: float) -> Iterator[None]:
    """Watch this rank for the time of a command, from before anything heavy is imported.

    Stacks and tracebacks go to files in the folder `errors`, which is the same for all ranks. After an error
    the watch stays on, so that `job.errors` can say where.
    """
    global _watch
    if "TORCHELASTIC_RUN_ID" in os.environ:  # nothing else ends a rank whose torchrun was killed
        end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    _watch = Watch(Path(errors), hang_seconds)
    yield
    _watch.finish()


def end_with_parent(parent: int) -> None:
    """From now on the kernel ends this process, also a stopped one, with `parent`, which has started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux's PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def claim_files() -> None:
    """Empty the error file of earlier runs; called when the run folder belongs to this run."""
    if _watch is not None:
        _watch.owns_files = True
        _watch.file.truncate(0)


def watch() -> Watch | None:
    """Return the watch of this process; None if nothing is watched."""
    return _watch


def beat(doing: str | None = None, *, step: int | None = None) -> None:
    """Report that this rank made progress. `doing` stays until it changes; `step` is the one just completed.

    Many bytes read or written count as progress, too, and so does what `count_as_progress` names.
    """
    if _watch is None:
        return
    _watch.content["beats"] += 1  # which the next look writes for the other ranks
    if step is not None:
        _watch.write(step=step)
    if doing is not None:
        _watch.write(doing=doing)


@contextlib.contextmanager
def stage(doing: str) -> Iterator[None]:
    """Report a part of a command's start with a beat; once it is done, print on rank 0 how long it took."""
    before = _watch and _watch.content["doing"]
    beat(doing)
    began = time.monotonic()
    yield
    beat(before)
    seconds = time.monotonic() - began
    if _watch is not None and rank() == 0 and seconds >= 0.05 and QUIET not in os.environ:
        print(f"{doing} {seconds:.1f} s", file=sys.stderr, flush=True)


def count_as_progress(progress: Callable[[], Any]) -> None:
    """From now on, a change of what `progress` returns counts as progress of this rank."""
    if _watch is not None:
        _watch.progress.append(progress)


class Watch:
    """The heartbeat of one rank, and the thread that reads the heartbeats of all."""

    def __init__(self, errors: Path, hang_seconds: float):
        self.errors = errors
        self.hang_seconds = hang_seconds
        self.content: dict[str, Any] = {"rank": rank(), "pid": os.getpid(), "host": socket.gethostname()}
        self.content |= {"doing": "starting", "step": 0, "beats": 0, "hang": None, "has_ended": False}
        self.progress: list[Callable[[], Any]] = [lambda: len(sys.modules)]  # imports are work, too
        self._progress: list[Any] = []
        self._moved = 0
        self._period = min(5.0, hang_seconds / 20)
        self._lock = threading.Lock()
        self._done = threading.Event()
        errors.mkdir(parents=True, exist_ok=True)
        self.path = errors / f"rank{rank()}.txt"
        self.owns_files = not os.path.lexists(self.path)  # if it is not new, another live run may write to it
        self.file = io.TextIOWrapper(open_to_write(self.path, "ab"), "utf-8")
        # a start that is refused in the folder of a live run must not write there
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        is_local = error_file and not has_several_machines()
        self._heartbeats = Path(error_file).parent.parent if is_local else errors
        self._heartbeat = None  # nobody reads it if there is one rank
        if world_size() > 1:
            self._heartbeat = open_to_write(self._heartbeats / f"rank{rank()}.json", "r+b", buffering=0)
        self.write()
        faulthandler.enable(self.file)
        faulthandler.register(signal.SIGUSR2, self.file)  # works while compiled code holds the interpreter
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def write(self, **news: Any) -> None:
        """Change some of the content. It takes some ten microseconds, and others see all of it at once."""
        with self._lock:  # the thread writes, too
            self.content |= news
            if self._heartbeat is not None:
                os.pwrite(self._heartbeat.fileno(), json.dumps(self.content).encode().ljust(ROOM), 0)

    def others(self) -> list[dict[str, Any]]:
        """Return the content of the other ranks' files, as far as they are there."""
        contents = []
        for number in range(world_size()):
            # one that does not exist yet, or is being written, comes with the next look
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                if number != rank():
                    contents.append(json.loads(read_file(self._heartbeats / f"rank{number}.json")))
        return contents

    def has_another_ended(self) -> bool:
        """Return whether another rank has ended, as far as this one can see."""
        return any(
            content["has_ended"] or _status(content) == psutil.STATUS_ZOMBIE for content in self.others()
        )

    def finish(self) -> None:
        """End the watch, and remove its heartbeat, and its error file if that is empty."""
        global _watch
        _watch = None
        self._done.set()
        self._thread.join(10.0)
        self.write(has_ended=True)
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)
        self.file.close()
        if self.owns_files:  # no file of another run is removed
            (self.errors / f"rank{rank()}.json").unlink(missing_ok=True)
            if self.path.exists() and not self.path.stat().st_size:
                self.path.unlink()
            with contextlib.suppress(OSError):  # other ranks' files may lie there
                self.errors.rmdir()

    # ---- the thread

    def _look(self) -> None:
        """Look at the beats of all ranks in every period, until none has changed for too long."""
        seen = None
        still = 0.0
        looked = time.monotonic()
        while not self._done.wait(self._period):
            now = time.monotonic()
            passed = min(now - looked, 2 * self._period)  # in the rest of a longer gap, it was stopped
            looked = now
            self._add_progress(passed)
            self.write()
            beats = [(content["rank"], content["beats"]) for content in (self.content, *self.others())]
            still = still + passed if beats == seen else 0.0
            seen = beats
            if still > self.hang_seconds and not self._done.is_set():
                self._end_job()
            if has_several_machines():
                os.fsync(self._heartbeat.fileno())

    def _add_progress(self, passed: float) -> None:
        """Add a beat if something moved in so many seconds that calls no `beat`."""
        counters = psutil.Process().io_counters()
        progress = [count() for count in self.progress]
        moved = counters.read_chars + counters.write_chars
        much = MUCH_IO * passed + ROOM * world_size()  # beside the heartbeats of all
        if progress != self._progress or moved - self._moved > much:
            self.content["beats"] += 1
        self._progress = progress
        self._moved = moved

    def _end_job(self) -> NoReturn:
        """Write the stacks, read what the other ranks do, name the ranks that hang, and end."""
        self._write_stacks()
        time.sleep(max(3.0, 3 * self._period))  # the other ranks do the same meanwhile
        contents = sorted([self.content, *self.others()], key=lambda content: content["rank"])
        causes, hanging, waiting, stopped = [], [], [], []  # a stopped process explains the other ranks
        for content in contents:
            state, place = content["hang"] or ("does not answer", "")
            status = _status(content)
            if status == psutil.STATUS_STOPPED:
                state = IS_STOPPED
                stopped.append(content["pid"])
            elif status and not content["hang"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(content["pid"], signal.SIGUSR2)  # now it writes its stacks
                time.sleep(1)
            text = f"rank {content['rank']} (pid {content['pid']}) {state} while {content['doing']}{place}"
            is_cause = state in (IS_STOPPED, WORKER_STOPPED)
            (causes if is_cause else waiting if state == WAITS else hanging).append(text)
        ranks = listed(causes or hanging or waiting, 3, "; ")
        remedy = (
            f"The stacks of all ranks and workers are in {self.errors}; raise train.hang_seconds if it only "
            f"needs longer, or {AGAIN}."
        )
        fact = f"megatron-vlm: no rank came further for {self.hang_seconds:g} s: {ranks}."
        is_first = self.content is next(content for content in contents if content["hang"])
        report_end("hang", HANG_CODE, join_lines([fact, remedy]), is_first)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # torchrun sends SIGTERM, which does not reach it
        end_now(HANG_CODE)

    def _write_stacks(self) -> None:
        """Write the stacks of threads and data workers, and for the other ranks where this one is."""
        print(printable(f"rank {rank()}: no progress; {self.content['doing']}"), file=self.file, flush=True)
        faulthandler.dump_traceback(self.file)
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        waits = world_size() > 1 and any(WAITING.search(frame.filename) for frame in stack[-3:])
        place = f", in {stack[-1].name} ({os.path.basename(stack[-1].filename)}:{stack[-1].lineno})"
        children = multiprocessing.active_children()
        workers = {worker: psutil.Process(worker.pid).status() for worker in children}
        state = WAITS if waits else "hangs"
        if psutil.STATUS_STOPPED in workers.values():
            state = WORKER_STOPPED
        self.write(hang=(state, place))
        for worker, status in workers.items():
            print(f"\nworker {worker.name}, pid {worker.pid}, {status}", file=self.file, flush=True)
            os.kill(worker.pid, signal.SIGUSR2)  # it writes into the same file, unless it is stopped
            time.sleep(0.5)


def report_end(kind: str, code: int, message: str, speaks: bool = True) -> None:
    """Say why this rank ends: to its launcher, in the file that torch's elastic agent reads, or on screen.

    `kind` is error, interrupt, hang, or lost (another rank ended). Without `--nproc`, ranks that `speaks`
    print.
    """
    message = printable(message)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()
        extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now, "kind": kind, "code": code}
        with contextlib.suppress(OSError):  # the disk is full, or torchrun has removed its folder
            atomic_write(path, json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if _watch is not None:  # after its reason is there, as others wait for it
        _watch.write(has_ended=True)
    if message and speaks and LAUNCHER not in os.environ:
        print(message, file=sys.stderr, flush=True)


def _status(content: dict[str, Any]) -> str:
    """Return psutil's status of a rank's process, a zombie if it is gone; empty on another machine."""
    if content["host"] != socket.gethostname():
        return ""
    try:
        return psutil.Process(content["pid"]).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def end_now(code: int) -> NoReturn:
    """End this process and its data workers, also stopped workers, which nothing else ends.

    At a normal exit, torch's groups would wait for ranks that have ended, or print.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
