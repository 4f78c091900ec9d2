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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megatron_vlm.files import atomic_write, open_to_write, read_file
from megatron_vlm.messages import join_lines, listed, printable

HANG_CODE = 3  # the exit code when no rank makes progress
LAUNCHER = "MEGATRON_VLM_LAUNCHER"  # the process id of `--nproc`, set for the ranks that it starts
AGAIN = "start the same command again: it goes on from what is saved"
WAITING = re.compile("torch/distributed/|megatron/core/(distributed|pipeline_parallel|tensor_parallel)/")
MUCH_IO = 1 << 21  # bytes read or written per second that count as a beat while `files` is set
ROOM = 1 << 12  # bytes of a rank's file, reserved at the start for a disk that fills up
_WORST_FIRST = ("is stopped", "waits for a stopped data worker", "is gone", "does not answer", "hangs")
_WORST_FIRST += ("waits for other ranks",)

_watch: Watch | None = None


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def has_several_machines() -> bool:
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


@contextlib.contextmanager
def watching(run_dir: str | Path, hang_seconds: float, errors: str = "errors") -> Iterator[None]:
    """Watch this rank for the time of a command, from before anything heavy is imported.

    After an error the watch stays on, so that `job.errors` can say where. If the run folder may only be read,
    as for an export, the files of errors are in a new folder.
    """
    global _watch
    folder = Path(run_dir)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="megatron-vlm-"))
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    open_to_write(lock, "r+b").close()  # tells the next run that errors/ is a run's
    if "TORCHELASTIC_RUN_ID" in os.environ:  # nothing else ends a rank whose torchrun was killed
        end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    _watch = Watch(folder / errors, hang_seconds)
    _watch.run_dir = os.path.abspath(run_dir)
    yield
    _watch.finish()
    _watch = None
    with contextlib.suppress(FileNotFoundError):  # another rank was first
        if not lock.stat().st_size:  # no run has taken it
            lock.unlink()


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


def beat(doing: str | None = None, *, step: int | None = None, files: bool = False) -> None:
    """Report that this rank made progress. `doing` stays until it changes; `step` is the one just completed.

    `files`: until the next beat, bytes that this process reads and writes count as progress.
    """
    if _watch is None:
        return
    _watch.content["beats"] += 1  # which the next look writes for the other ranks
    if step is not None:
        _watch.write(step=step)
    if doing is not None:
        _watch.files = files
        _watch.write(doing=doing)


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
        # A job that was killed or refused here leaves heartbeats of another port, which are not read.
        self.content["port"] = os.environ.get("MASTER_PORT")
        self.progress: list[Callable[[], Any]] = [lambda: len(sys.modules)]  # imports are work, too
        self.files = False
        self.run_dir = ""
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
        self._heartbeats.mkdir(parents=True, exist_ok=True)
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
        """Return the content of the other ranks' files, as far as they are there and belong to this job."""
        contents = []
        for number in range(world_size()):
            # one that does not exist yet, or is being written, comes with the next look
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                if number != rank():
                    contents.append(json.loads(read_file(self._heartbeats / f"rank{number}.json")))
        return [content for content in contents if content.get("port") == self.content["port"]]

    def has_another_ended(self) -> bool:
        """Return whether another rank has ended, as far as this one can see."""
        return any(content["has_ended"] or _status(content) == "is gone" for content in self.others())

    def wait_for_another_end(self, seconds: float) -> None:
        """Wait until a rank has said why it ends; the launcher ends all when the first has ended."""
        limit = time.monotonic() + seconds
        while not self.has_another_ended() and time.monotonic() < limit:
            time.sleep(0.05)

    def finish(self) -> None:
        """End the watch of a command that has ended well."""
        self._done.set()
        self._thread.join()
        self.write(has_ended=True)
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)
        self.file.close()
        self.tidy()

    def tidy(self) -> None:
        """Remove this run's heartbeat, and its error file if that is empty; never a file of another run."""
        if self.owns_files:
            (self.errors / f"rank{rank()}.json").unlink(missing_ok=True)
            if self.path.exists() and not self.path.stat().st_size:
                self.path.unlink()
            with contextlib.suppress(OSError):  # other ranks' files may lie there
                self.errors.rmdir()
                if self.errors.name == "export":  # which lies in the folder of its run's errors
                    self.errors.parent.rmdir()

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
            self._count_progress(passed)
            self.write()
            beats = [(content["rank"], content["beats"]) for content in (self.content, *self.others())]
            still = still + passed if beats == seen else 0.0
            seen = beats
            if still > self.hang_seconds and not self._done.is_set():
                self._end_job()
            if has_several_machines():
                os.fsync(self._heartbeat.fileno())

    def _count_progress(self, passed: float) -> None:
        counters = psutil.Process().io_counters()
        progress = [count() for count in self.progress]
        moved = counters.read_chars + counters.write_chars
        if progress != self._progress or (self.files and moved - self._moved > MUCH_IO * passed):
            self.content["beats"] += 1
        self._progress = progress
        self._moved = moved

    def _end_job(self) -> NoReturn:
        """Write the stacks, read what the other ranks do, name the rank that hangs, and end."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        waits = any(WAITING.search(frame.filename) for frame in stack[-3:])
        where = f"{stack[-1].name} ({os.path.basename(stack[-1].filename)}:{stack[-1].lineno})"
        status = "waits for other ranks" if waits and world_size() > 1 else "hangs"
        workers = [psutil.Process(worker.pid).status() for worker in multiprocessing.active_children()]
        status = _WORST_FIRST[1] if psutil.STATUS_STOPPED in workers else status
        self.write(hang={"where": where, "status": status})
        self._write_stacks()
        contents = sorted([self.content, *self._hear_others()], key=lambda content: content["rank"])
        statuses = [_status(content) for content in contents]
        worst = min(statuses, key=_WORST_FIRST.index)  # the other ranks only wait for these
        texts = []
        is_lost = False
        for content, status in zip(contents, statuses, strict=True):
            place = f", in {content['hang']['where']}" if content["hang"] else ""
            text = f"rank {content['rank']} (pid {content['pid']}) {worst} while {content['doing']}{place}"
            texts += [text] if status == worst else []
            if status == "is stopped":  # torchrun sends SIGTERM, which does not reach it
                os.kill(content["pid"], signal.SIGKILL)
            # one that may be lost with its machine: then the job may start again
            is_lost |= status == "does not answer" and content["host"] != self.content["host"]
        fact = f"megatron-vlm: no rank came further for {self.hang_seconds:g} s: {listed(texts, 3, '; ')}."
        remedy = (
            f"The stacks of all ranks and workers are in {self.errors}; raise train.hang_seconds if it only "
            f"needs longer, or {AGAIN}."
        )
        message = join_lines([fact, remedy])
        speaks = self.content is next(content for content in contents if content["hang"])
        report_end("lost" if is_lost else "error", HANG_CODE, message, speaks)
        end_now(HANG_CODE)

    def _write_stacks(self) -> None:
        print(printable(f"rank {rank()}: no progress; {self.content['doing']}"), file=self.file, flush=True)
        faulthandler.dump_traceback(self.file)
        for worker in multiprocessing.active_children():
            status = psutil.Process(worker.pid).status()
            print(f"\nworker {worker.name}, pid {worker.pid}, {status}", file=self.file, flush=True)
            os.kill(worker.pid, signal.SIGUSR2)  # it writes into the same file, unless it is stopped
            time.sleep(0.5)

    def _hear_others(self) -> list[dict[str, Any]]:
        """Return the others' content when they had time to answer; here, late ones write their stacks now."""
        time.sleep(max(3.0, 3 * self._period))
        other_ranks = self.others()
        for content in other_ranks:
            if content["host"] == self.content["host"] and _status(content) == "does not answer":
                os.kill(content["pid"], signal.SIGUSR2)
                time.sleep(1)
        return other_ranks


def report_end(kind: str, code: int, message: str, speaks: bool = True) -> None:
    """Say why this rank ends: to its launcher, in the file that torch's elastic agent reads, or on screen.

    `kind` is error, interrupt or lost (another rank ended). Without `--nproc`, ranks that `speaks` print.
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
    """Return how a rank is, in words of _WORST_FIRST. Processes of other machines are not looked at."""
    if content["host"] == socket.gethostname():
        try:
            status = psutil.Process(content["pid"]).status()
        except psutil.NoSuchProcess:
            return "is gone"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return "is stopped" if status == psutil.STATUS_STOPPED else "is gone"
    return content["hang"]["status"] if content["hang"] else "does not answer"


def end_now(code: int) -> NoReturn:
    """End this process and its data workers, also stopped workers, which nothing else ends.

    At a normal exit, torch's groups would wait for ranks that have ended, or print.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
