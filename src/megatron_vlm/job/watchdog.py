"""Nothing hangs: a job in which no rank makes progress for `train.hang_seconds` ends, with its stacks.

Code that can take long reports progress with `beat`: each micro batch, each imported tensor, each phase of a
run. A thread of every rank looks at the beats of all ranks. If no rank has made progress, every rank writes
the stacks of all its threads, and of its data workers, to `<errors>/rankN.txt`, and says what it does. The
first rank that has heard all others names the rank that hangs, and all end.

A rank that was stopped (SIGSTOP, Ctrl-Z) and continues in time has missed nothing: it does not count the time
in which it did not run. `kill -USR2 PID` writes a rank's stacks at any time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_vlm.job import ranks
from megatron_vlm.job.last_words import HANG_CODE, say

WAITING = tuple(f"{name}/" for name in ("torch/distributed", "megatron/core/pipeline_parallel"))
WAITING += tuple(f"megatron/core/{name}/" for name in ("distributed", "tensor_parallel"))
MUCH_IO = 1 << 21  # bytes read or written per second that count as a beat while `files` is set

_watch: Watch | None = None


def start(errors: Path, hang_seconds: float, run_dir: Path | None = None) -> None:
    """Start watching this rank, before anything heavy is imported; `finish` stops it."""
    global _watch
    _watch = Watch(errors, hang_seconds, ranks.RankFile(ranks.shared_folder(run_dir)))


@contextlib.contextmanager
def watching(run_dir: str | Path, hang_seconds: float, errors: str = "errors") -> Iterator[None]:
    """`start` for the time of a command. After an error it stays on, so that `failures` can say where.

    The files of errors lie in the run's folder, or in a new one if that may only be read, as for an export.
    """
    folder = Path(run_dir)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="megatron-vlm-"))
    start(folder / errors, hang_seconds, Path(run_dir))
    yield
    finish()


def own() -> None:
    """Removes error and rank files of earlier runs; called when the run folder belongs to this run."""
    if _watch is not None:
        _watch.own()


def watch() -> Watch | None:
    """The watch that `start` began; None if nothing is watched."""
    return _watch


def beat(doing: str | None = None, *, step: int | None = None, files: bool = False) -> None:
    """Reports that this rank made progress. `doing` stays until it changes; `step` is the one just completed.

    `files`: until the next beat, bytes that this process reads and writes count as progress.
    """
    if _watch is not None:
        _watch.beat(doing, step, files)


def also(progress: Callable[[], Any]) -> None:
    """Counts a change of what `progress` returns as progress of this rank."""
    if _watch is not None:
        _watch.progress.append(progress)


def reader() -> None:
    """Called by a thread that reads: while the main thread waits for it, it says where the rank is."""
    if _watch is not None:
        _watch.reader = threading.get_ident()


def finish() -> None:
    """Stops watching: the work is done."""
    global _watch
    if _watch is not None:
        _watch.finish()
        _watch = None


class Watch:
    """The beats of one rank and the thread that looks at all of them."""

    def __init__(self, errors: Path, hang_seconds: float, record: ranks.RankFile):
        self.errors, self.hang_seconds, self.record = errors, hang_seconds, record
        self.progress: list[Callable[[], Any]] = [lambda: len(sys.modules)]  # imports are work, too
        self.reader: int | None = None
        self.began = time.time()
        self._files, self._moved = False, 0
        self._found: list[Any] = []
        self._parent = os.getppid()
        self._period = min(5.0, hang_seconds / 20)
        self._done = threading.Event()
        errors.mkdir(parents=True, exist_ok=True)
        self.path = errors / f"rank{ranks.rank()}.txt"
        descriptor, self.owned = _opened(self.path)  # if it is not new, another live run may write to it
        self.file = open(descriptor, "a", encoding="utf-8")
        faulthandler.enable(self.file)  # a crash in compiled code writes its stacks there
        faulthandler.register(signal.SIGUSR2, self.file)  # works while compiled code holds the interpreter
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def beat(self, doing: str | None, step: int | None, files: bool) -> None:
        if doing is not None:
            self._files = files
        content = self.record.content
        news: dict[str, Any] = {"beats": content["beats"] + 1}
        if doing is not None:
            news["doing"] = doing
        if step is not None:
            news["step"] = step
        self.record.write(**news)

    def own(self) -> None:
        self.owned = True
        self.file.truncate(0)
        self.record.forget_earlier_jobs()

    def finish(self) -> None:
        self._done.set()
        self.record.end("done", "")
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)
        self.file.close()
        self.tidy()

    def tidy(self) -> None:
        """Remove this run's file if it is empty; never that of another run."""
        if self.owned and self.path.exists() and not self.path.stat().st_size:
            self.path.unlink()
            with contextlib.suppress(OSError):  # other ranks' files may lie in it
                self.errors.rmdir()
                if self.errors.parent.name == "errors":  # the folder of an export lies in that of its run
                    self.errors.parent.rmdir()

    # ---- the thread

    def _look(self) -> None:
        seen, still, looked = None, 0.0, time.monotonic()
        while not self._done.wait(self._period):
            now = time.monotonic()
            passed, looked = now - looked, now
            self._beat_for_files_and_workers(passed)
            others = self.record.others()
            found = [self.record.content["beats"], *((n, content["beats"]) for n, content in others.items())]
            # this process did not run during the rest of a longer gap
            still = still + min(passed, 2 * self._period) if found == seen else 0.0
            seen = found
            if still > self.hang_seconds and not self._done.is_set():
                self._end_the_job()
            if ranks.several_machines():
                self.record.flush()
            if os.getppid() != self._parent and "TORCHELASTIC_RUN_ID" in os.environ:
                end_now(HANG_CODE)  # torchrun was killed; nobody would end this rank

    def _beat_for_files_and_workers(self, passed: float) -> None:
        found = [progress() for progress in self.progress]
        moved = _bytes_read_and_written()
        if found != self._found or (self._files and moved - self._moved > MUCH_IO * passed):
            self.record.write(beats=self.record.content["beats"] + 1)
        self._found, self._moved = found, moved

    def _end_the_job(self) -> None:
        frames = self._frames()
        where = _where(frames) + _stopped_workers()
        self.record.write(hang={"where": where, "waits": any(map(_waits, frames[:3]))})
        self._write_stacks()
        others = self._hear_others()
        contents = {ranks.rank(): self.record.content, **others}
        if self.record.claim():
            self.record.end("hang", describe(contents, self.hang_seconds, self.errors))
            say(self.record.content["ended"]["message"])
        else:
            self.record.end("hang", "")
        for content in others.values():  # torchrun sends SIGTERM, which does not reach a stopped process
            if ranks.state(content) == "T":
                os.kill(content["pid"], signal.SIGKILL)
        end_now(HANG_CODE)

    def _frames(self) -> list[Any]:
        """The main thread's, the innermost first; the reader's, if the main thread waits for that."""
        threads = sys._current_frames()
        frames = list(_outwards(threads.get(threading.main_thread().ident)))
        if any(frame.f_code.co_filename.endswith("multiprocessing/pool.py") for frame in frames[:4]):
            return list(_outwards(threads.get(self.reader))) or frames
        return frames

    def _write_stacks(self) -> None:
        content = self.record.content
        self.file.write(
            f"rank {ranks.rank()}, pid {os.getpid()}: no progress for {self.hang_seconds:g} s; "
            f"{content['doing']}\n"
        )
        self.file.flush()
        faulthandler.dump_traceback(self.file)
        for worker in multiprocessing.active_children():
            letter = ranks.process_state(worker.pid)
            stopped = " (stopped)" if letter == "T" else ""
            self.file.write(f"\nworker {worker.name}, pid {worker.pid}, state {letter}{stopped}\n")
            self.file.flush()
            if letter and letter not in "TZ":
                os.kill(worker.pid, signal.SIGUSR2)  # it writes into the same file
                time.sleep(0.2)

    def _hear_others(self) -> dict[int, dict[str, Any]]:
        """What the other ranks say, when all have answered or time is up; late ones are asked for stacks."""
        asked, deadline = False, time.monotonic() + max(3.0, 6 * self._period)
        while True:
            others = self.record.others()
            silent = [
                content
                for content in others.values()
                if not content["hang"] and ranks.state(content) in ("R", "S", "D", "?")
            ]
            if not silent or time.monotonic() > deadline:
                return others
            if not asked and time.monotonic() > deadline - 2:
                asked = True
                for content in silent:
                    if ranks.state(content) in ("R", "S", "D"):
                        os.kill(content["pid"], signal.SIGUSR2)
            time.sleep(0.1)


def describe(contents: dict[int, dict[str, Any]], hang_seconds: float, errors: Path) -> str:
    """Which rank hangs, where, and what to do; `contents` are those of the ranks' files, by rank."""
    stopped = {n: content for n, content in contents.items() if ranks.state(content) == "T"}
    gone = {n: content for n, content in contents.items() if ranks.state(content) in ("", "Z")}
    silent = {n: c for n, c in contents.items() if not c["hang"] and n not in stopped and n not in gone}
    at_work = {n: c for n, c in contents.items() if c["hang"] and not c["hang"]["waits"]}
    what = f"no rank came further for {hang_seconds:g} s"
    if stopped:
        who = _listed(stopped, lambda c: f"pid {c['pid']} is stopped (SIGSTOP) while {c['doing']}")
        remedy = "start again to go on from the last checkpoint; a rank may be stopped for less time only"
    elif gone:
        who = _listed(gone, lambda c: f"pid {c['pid']} is no more, it was {c['doing']}")
        remedy = "start again to go on from the last checkpoint"
    elif silent:
        who = _listed(silent, lambda c: f"pid {c['pid']} does not answer while {c['doing']}")
        remedy = "look at that machine, then start again to go on from the last checkpoint"
    else:
        hung = at_work or contents
        who = _listed(hung, lambda c: f"hangs while {c['doing']}, in {c['hang']['where']}")
        remedy = "raise train.hang_seconds if it only needs longer"
    return f"megatron-vlm: {what}: {who}.\nThe stacks of all ranks and workers are in {errors}; {remedy}."


def _listed(contents: dict[int, dict[str, Any]], say: Callable[[dict], str]) -> str:
    shown = [f"rank {number} {say(content)}" for number, content in sorted(contents.items())[:3]]
    more = [f"{len(contents) - 3} more"] if len(contents) > 3 else []
    return "; ".join(shown + more)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor that appends to the file, and whether the file is new."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags), False


def _outwards(frame) -> Iterable[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame) -> bool:
    """Whether the frame waits for other ranks."""
    return any(place in frame.f_code.co_filename for place in WAITING)


def _where(frames: list[Any]) -> str:
    """The innermost frame, and our innermost frame if that is another."""
    if not frames:
        return "compiled code"
    ours = [frame for frame in frames if "megatron_vlm" in frame.f_code.co_filename]
    named = list(dict.fromkeys([frames[0], *ours[:1]]))
    return ", called by ".join(
        f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        for frame in named
    )


def _stopped_workers() -> str:
    pids = [worker.pid for worker in multiprocessing.active_children()]
    stopped = [str(pid) for pid in pids if ranks.process_state(pid) == "T"]
    return f"; its data worker (pid {', '.join(stopped)}) is stopped" if stopped else ""


def _bytes_read_and_written() -> int:
    counts = Path("/proc/self/io")
    lines = counts.read_text().splitlines() if counts.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def end_now(code: int) -> NoReturn:
    """End this process and its data workers, also stopped workers, which nothing else ends.

    At a normal exit, torch's groups would wait for ranks that have ended, or print.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
