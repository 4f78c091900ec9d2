"""Ends a job in which no rank makes progress for `train.hang_seconds`, with the stacks of all ranks.

Code that can take long reports progress with `beat`: each micro batch, each imported tensor, each phase of a
run. A thread of every rank looks at the beats of all ranks. If no rank has made progress, every rank writes
the stacks of all its threads and data workers to `<errors>/rankN.txt`, and says what it does. One of them
names the rank that hangs, and all end.

A rank that was stopped (SIGSTOP, Ctrl-Z) and continues in time has missed nothing: it does not count the time
in which it did not run. `kill -USR2 PID` writes a rank's stacks at any time.

nvidia-resiliency-ext (0.4.1) is not used: it needs a launcher and a monitor process of its own, has no stacks
of data workers, declares itself experimental, and 0.4.1 depends on NVML for jobs that may run on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_vlm.files import open_to_write
from megatron_vlm.job import ranks
from megatron_vlm.messages import listed

HANG_CODE = 3  # the exit code when no rank makes progress
WAITING = tuple(f"{name}/" for name in ("torch/distributed", "megatron/core/pipeline_parallel"))
WAITING += tuple(f"megatron/core/{name}/" for name in ("distributed", "tensor_parallel"))
HELD_AFTER = 10  # seconds after the watchdog, until code that holds the interpreter has its stacks written
MUCH_IO = 1 << 21  # bytes read or written per second that count as a beat while `files` is set
_WORST_FIRST = ("is stopped (SIGSTOP)", "waits for a stopped data worker", "is no more", "does not answer")
_WORST_FIRST += ("hangs", "waits for other ranks")

_watch: Watch | None = None


@contextlib.contextmanager
def watching(
    run_dir: str | Path, hang_seconds: float, errors: str = "errors", again: str = ranks.RUN_GOES_ON
) -> Iterator[None]:
    """Watch this rank for the time of a command, from before anything heavy is imported.

    After an error the watch stays on, so that `failures` can say where. `again` is the advice that is printed
    last if no error of the command's own ends it. The files of errors lie in the run's folder, or in a new
    one if that may only be read, as for an export.
    """
    global _watch
    folder = Path(run_dir)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="megatron-vlm-"))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # nothing else ends a rank whose torchrun was killed
        end_with_parent(int(os.environ.get(ranks.LAUNCHER_SPEAKS, os.getppid())))
    _watch = Watch(folder / errors, hang_seconds, ranks.RankFile(ranks.shared_folder(run_dir), again))
    yield
    _watch.finish()
    _watch = None


def end_with_parent(parent: int) -> None:
    """From now on the kernel ends this process, also a stopped one, with `parent`, which has started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux's PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def claim_files() -> None:
    """Remove error and rank files of earlier runs; called when the run folder belongs to this run."""
    if _watch is not None:
        _watch.owned = True
        _watch.file.truncate(0)
        _watch.record.forget_earlier_jobs()


def watch() -> Watch | None:
    """Return the watch of this process; None if nothing is watched."""
    return _watch


def again() -> str:
    """Return the remedy of this process's command, as `watching` was told."""
    return _watch.record.content["again"] if _watch else ranks.AGAIN


def beat(doing: str | None = None, *, step: int | None = None, files: bool = False) -> None:
    """Report that this rank made progress. `doing` stays until it changes; `step` is the one just completed.

    `files`: until the next beat, bytes that this process reads and writes count as progress.
    """
    if _watch is None:
        return
    news: dict[str, Any] = {}
    if doing is not None:
        news["doing"] = doing
        _watch.files = files
    if step is not None:
        news["step"] = step
    _watch.record.content["beats"] += 1  # which the next look writes for the other ranks
    if news:
        _watch.record.write(**news)


def count_as_progress(progress: Callable[[], Any]) -> None:
    """From now on, a change of what `progress` returns counts as progress of this rank."""
    if _watch is not None:
        _watch.progress.append(progress)


def this_thread_reads() -> None:
    """Called by the thread that reads. While the main thread waits for it, its stack is the rank's place."""
    if _watch is not None:
        _watch.reader = threading.get_ident()


class Watch:
    """The beats of one rank and the thread that looks at all of them."""

    def __init__(self, errors: Path, hang_seconds: float, record: ranks.RankFile):
        self.errors, self.hang_seconds, self.record = errors, hang_seconds, record
        self.progress: list[Callable[[], Any]] = [lambda: len(sys.modules)]  # imports are work, too
        self.reader: int | None = None
        self.files, self._moved = False, 0
        self._progress_seen: list[Any] = []
        self._period = min(5.0, hang_seconds / 20)
        self._done = threading.Event()
        errors.mkdir(parents=True, exist_ok=True)
        self.path = errors / f"rank{ranks.rank()}.txt"
        self.owned = not os.path.lexists(self.path)  # if it is not new, another live run may write to it
        self.file = io.TextIOWrapper(open_to_write(self.path, append=True), "utf-8")
        faulthandler.enable(self.file)
        faulthandler.register(signal.SIGUSR2, self.file)  # works while compiled code holds the interpreter
        self._expect_to_look_again()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """End the watch of a command that has ended well."""
        self._done.set()
        self._thread.join()
        self.record.write(ended="done")
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)
        self.file.close()
        self.tidy()

    def tidy(self) -> None:
        """Remove this run's file if it is empty; never the file of another run."""
        if self.owned and self.path.exists() and not self.path.stat().st_size:
            self.path.unlink()
            with contextlib.suppress(OSError):  # other ranks' files may lie in it
                self.errors.rmdir()
                if self.errors.parent.name == "errors":  # the folder of an export lies in that of its run
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
            self._expect_to_look_again()
            self._count_progress(passed)
            self.record.write(looked=time.time())
            others = self.record.others()
            beats = [self.record.content["beats"], *((n, content["beats"]) for n, content in others.items())]
            still = still + passed if beats == seen else 0.0
            seen = beats
            if still > self.hang_seconds and not self._done.is_set():
                self._end_the_job()
            if ranks.several_machines():
                self.record.flush()

    def _expect_to_look_again(self) -> None:
        """A thread in C writes the stacks if code holds the interpreter, so that this one cannot look. It
        also does so after a process was stopped for long, and so it does not end it."""
        faulthandler.dump_traceback_later(self.hang_seconds + HELD_AFTER, file=self.file)

    def _count_progress(self, passed: float) -> None:
        progress = [count() for count in self.progress]
        moved = _bytes_read_and_written()
        if progress != self._progress_seen or (self.files and moved - self._moved > MUCH_IO * passed):
            self.record.content["beats"] += 1
        self._progress_seen = progress
        self._moved = moved

    def _end_the_job(self) -> NoReturn:
        """Write the stacks, hear what the other ranks do, name the rank that hangs, and end."""
        frames = self._frames()
        innermost = "".join(frame.f_code.co_filename for frame in frames[:3])
        waits = ranks.world_size() > 1 and any(place in innermost for place in WAITING)
        workers = multiprocessing.active_children()
        stopped = [worker.pid for worker in workers if ranks.process_state(worker.pid) == "T"]
        self.record.write(hang={"where": _where(frames), "waits": waits, "stopped": stopped})
        self._write_stacks()
        others = self._hear_others()
        message = hung({ranks.rank(): self.record.content, **others}, self.hang_seconds, self.errors)
        for content in others.values():  # torchrun sends SIGTERM, which does not reach a stopped process
            if ranks.state(content) == "T":
                os.kill(content["pid"], signal.SIGKILL)
        # a rank of another machine that does not answer may be lost with it: then the job may start again
        is_lost = any(ranks.state(content) == "?" and not content["hang"] for content in others.values())
        ranks.tell("lost" if is_lost else "hang", HANG_CODE, message, self.record)
        end_now(HANG_CODE)

    def _frames(self) -> list[Any]:
        """The main thread's, the innermost first; the reader's, if the main thread waits for that."""
        threads = sys._current_frames()
        frames = list(_outwards(threads.get(threading.main_thread().ident)))
        if any(frame.f_code.co_filename.endswith("multiprocessing/pool.py") for frame in frames[:4]):
            return list(_outwards(threads.get(self.reader))) or frames
        return frames

    def _write_stacks(self) -> None:
        doing = self.record.content["doing"]
        self.file.write(f"rank {ranks.rank()}: no progress for {self.hang_seconds:g} s; {doing}\n")
        self.file.flush()
        faulthandler.dump_traceback(self.file)
        workers = multiprocessing.active_children()
        for worker in workers:
            letter = ranks.process_state(worker.pid)
            self.file.write(f"\nworker {worker.name}, pid {worker.pid}, state {letter}\n")
            self.file.flush()
            os.kill(worker.pid, signal.SIGUSR2)  # it writes into the same file, unless it is stopped (T)
            time.sleep(0.2)
        time.sleep(bool(workers))  # also on a machine that is busy

    def _hear_others(self) -> dict[int, dict[str, Any]]:
        """Return the others' content when all have answered or time is up; late ones write their stacks."""
        deadline = time.monotonic() + max(3.0, 6 * self._period)
        while True:
            others = self.record.others()
            late = [content for content in others.values() if not content["hang"]]
            late = [content["pid"] for content in late if ranks.state(content) not in ("T", "", "Z")]
            if not late or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        here = {content["pid"] for content in others.values() if ranks.state(content) in ("R", "S", "D")}
        for pid in here.intersection(late):
            os.kill(pid, signal.SIGUSR2)
            time.sleep(1)
        return others


def hung(contents: dict[int, dict[str, Any]], hang_seconds: float, errors: Path) -> str:
    """Return the last lines of a job without progress: which rank hangs, where, and what to do."""
    states = {number: _state_of(content) for number, content in sorted(contents.items())}
    worst = min(states.values(), key=_WORST_FIRST.index)  # the other ranks only wait for these
    texts = []
    for number in (number for number, state in states.items() if state == worst):
        content = contents[number]
        hang = content["hang"] or {}
        workers = f" (pid {', '.join(map(str, hang['stopped']))})" if hang.get("stopped") else ""
        where = f", in {hang['where']}" if hang else ""
        texts.append(f"rank {number} (pid {content['pid']}) {worst}{workers} while {content['doing']}{where}")
    may_be_slow = worst in ("hangs", "waits for other ranks")
    return (
        f"megatron-vlm: no rank came further for {hang_seconds:g} s: {listed(texts, 3, '; ')}.\n"
        f"The stacks of all ranks and workers are in {errors}; "
        f"{'raise train.hang_seconds if it only needs longer' if may_be_slow else again()}."
    )


def _state_of(content: dict[str, Any]) -> str:
    letter, hang = ranks.state(content), content["hang"]
    if letter in ("T", "", "Z"):
        return _WORST_FIRST[0 if letter == "T" else 2]
    if hang is None:
        return "does not answer"
    return _WORST_FIRST[1 if hang["stopped"] else 5 if hang["waits"] else 4]


def _outwards(frame) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _where(frames: list[Any]) -> str:
    """The innermost frame, and our innermost frame if that is another."""
    if not frames:
        return "compiled code"
    ours = [frame for frame in frames if frame.f_globals.get("__name__", "").startswith("megatron_vlm.")]
    return ", called by ".join(
        f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        for frame in dict.fromkeys([frames[0], *ours[:1]])
    )


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
