"""Nothing hangs: a job in which no rank makes progress for `train.hang_seconds` ends, with its stacks.

Code that can take long reports progress with `beat`: each micro batch, each imported tensor, each phase of a
run. A thread of every rank looks at the beats of all ranks. If no rank has made progress, every rank writes
the stacks of all its threads, and of its data workers, to `<errors>/rankN.txt`, and says what it does. The
first rank that has heard all others names the rank that hangs, and all end.

Code that never lets the interpreter go stops that thread, too. So a second process expects a sign of it in
every period. When none has come for longer, it writes the stacks and ends the rank, see `guard`.

A rank that was stopped (SIGSTOP, Ctrl-Z) and continues in time has missed nothing: it does not count the time
in which it did not run, and neither does its guard. `kill -USR2 PID` writes a rank's stacks at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
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

from megatron_vlm.files import open_to_write
from megatron_vlm.job import guard, ranks
from megatron_vlm.job.ranks import HANG_CODE, LOST_CODE, say

WAITING = tuple(f"{name}/" for name in ("torch/distributed", "megatron/core/pipeline_parallel"))
WAITING += tuple(f"megatron/core/{name}/" for name in ("distributed", "tensor_parallel"))
GUARD_AFTER = 10  # seconds after the watchdog, which has better words
SILENCE = 45  # seconds in which nothing is heard of any rank of another machine, until that counts as lost
MUCH_IO = 1 << 21  # bytes read or written per second that count as a beat while `files` is set

_watch: Watch | None = None


@contextlib.contextmanager
def watching(
    run_dir: str | Path, hang_seconds: float, errors: str = "errors", again: str = ranks.RUN_GOES_ON
) -> Iterator[None]:
    """Watches this rank for the time of a command, from before anything heavy is imported. After an error the
    watch stays on, so that `failures` can say where.

    `again` is the advice that is printed last if no error of the command's own ends it. The files of errors
    lie in the run's folder, or in a new one if that may only be read, as for an export.
    """
    global _watch
    folder = Path(run_dir)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="megatron-vlm-"))
    _watch = Watch(folder / errors, hang_seconds, ranks.RankFile(ranks.shared_folder(run_dir), again))
    yield
    _watch.finish()
    _watch = None


def claim_files() -> None:
    """Removes error and rank files of earlier runs; called when the run folder belongs to this run."""
    if _watch is not None:
        _watch.owned = True
        _watch.file.truncate(0)
        _watch.record.forget_earlier_jobs()


def watch() -> Watch | None:
    """The watch of this process; None if nothing is watched."""
    return _watch


def again() -> str:
    """The remedy of this process's command, as `watching` was told."""
    return ranks.again([_watch.record.content] if _watch else [])


def beat(doing: str | None = None, *, step: int | None = None, files: bool = False) -> None:
    """Reports that this rank made progress. `doing` stays until it changes; `step` is the one just completed.

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


def beside(groups: Iterable[int]) -> None:
    """Names process groups that end with this process, also if it is killed."""
    if _watch is not None:
        _watch.record.write(beside=list(groups))


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
        self._machines: dict[str, tuple[float, float]] = {}  # host: last look, seconds since
        self._period = min(5.0, hang_seconds / 20)
        self._done = threading.Event()
        errors.mkdir(parents=True, exist_ok=True)
        self.path = errors / f"rank{ranks.rank()}.txt"
        self.owned = not os.path.lexists(self.path)  # if it is not new, another live run may write to it
        self.file = io.TextIOWrapper(open_to_write(self.path, append=True), "utf-8")
        to_guard = guard.start(record, self.file.fileno(), hang_seconds + GUARD_AFTER)
        self._guarded = to_guard is not None  # not before Linux 5.3, and in some containers
        atexit.register(record.end, "done", "")  # Python itself ends the process
        os.register_at_fork(after_in_child=faulthandler.disable)  # a data worker enables it again
        faulthandler.enable(to_guard if self._guarded else self.file)
        faulthandler.register(signal.SIGUSR2, self.file)  # works while compiled code holds the interpreter
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._done.set()
        self._thread.join()
        self.record.end("done", "")
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
        seen = None
        still = 0.0
        looked = time.monotonic()
        while not self._done.wait(self._period):
            now = time.monotonic()
            self.record.write(looked=time.time())
            if not self._guarded:
                faulthandler.dump_traceback_later(self.hang_seconds + GUARD_AFTER, exit=True, file=self.file)
            passed = now - looked
            looked = now
            self._beat_for_files_and_workers(passed)
            others = self.record.others()
            beats = [self.record.content["beats"], *((n, content["beats"]) for n, content in others.items())]
            # in the rest of a longer gap, this process was stopped
            still = still + min(passed, 2 * self._period) if beats == seen else 0.0
            seen = beats
            if still > self.hang_seconds and not self._done.is_set():
                self._end_the_job()
            if gone := self._silent_machine(others, min(passed, 2 * self._period)):
                self._end_without(gone)
            if ranks.several_machines():
                self.record.flush()

    def _beat_for_files_and_workers(self, passed: float) -> None:
        progress = [count() for count in self.progress]
        moved = _bytes_read_and_written()
        if progress != self._progress_seen or (self.files and moved - self._moved > MUCH_IO * passed):
            self.record.write(beats=self.record.content["beats"] + 1)
        self._progress_seen = progress
        self._moved = moved

    def _end_the_job(self) -> None:
        frames = self._frames()
        innermost = "".join(frame.f_code.co_filename for frame in frames[:3])
        waits = ranks.world_size() > 1 and any(place in innermost for place in WAITING)
        self.record.write(hang={"where": _where(frames), "waits": waits})
        self._write_stacks()
        others = self._hear_others()
        contents = {ranks.rank(): self.record.content, **others}
        if self.record.claim():
            self.record.end("hang", ranks.hung(contents, self.hang_seconds, self.errors))
            say(self.record.content["ended"]["message"])
        else:
            self.record.end("hang", "")
        for content in others.values():  # torchrun sends SIGTERM, which does not reach a stopped process
            if ranks.state(content) == "T":
                os.kill(content["pid"], signal.SIGKILL)
        end_now(HANG_CODE)

    def _silent_machine(self, others: dict[int, dict[str, Any]], passed: float) -> str | None:
        """The name of a machine whose ranks have all been silent for SILENCE seconds, as without power."""
        looks: dict[str, float] = {}
        for content in others.values():
            is_done = content["ended"] and content["ended"]["kind"] == "done"
            if content["host"] != self.record.content["host"] and not is_done:
                looks[content["host"]] = max(looks.get(content["host"], 0.0), content["looked"])
        for host, looked in looks.items():
            before, silence = self._machines.get(host, (looked, 0.0))
            self._machines[host] = looked, silence + passed if looked == before else 0.0
        return next((host for host in looks if self._machines[host][1] > SILENCE), None)

    def _end_without(self, host: str) -> NoReturn:
        said = f"megatron-vlm: no rank on {host} was heard of for {SILENCE} s: it, or the way to it, is lost"
        self.record.end("lost", f"{said}.\n{again().capitalize()}.", code=LOST_CODE)
        if self.record.claim():
            say(self.record.content["ended"]["message"])
        end_now(LOST_CODE)

    def _frames(self) -> list[Any]:
        """The main thread's, the innermost first; the reader's, if the main thread waits for that."""
        threads = sys._current_frames()
        frames = list(_outwards(threads.get(threading.main_thread().ident)))
        if any(frame.f_code.co_filename.endswith("multiprocessing/pool.py") for frame in frames[:4]):
            return list(_outwards(threads.get(self.reader))) or frames
        return frames

    def _write_stacks(self) -> None:
        content = self.record.content
        self.file.write(f"rank {ranks.rank()}: no progress for {self.hang_seconds:g} s; {content['doing']}\n")
        self.file.flush()
        faulthandler.dump_traceback(self.file)
        for worker in multiprocessing.active_children():
            letter = ranks.process_state(worker.pid)
            self.file.write(f"\nworker {worker.name}, pid {worker.pid}, state {letter}\n")
            self.file.flush()
            os.kill(worker.pid, signal.SIGUSR2)  # it writes into the same file, unless it is stopped (T)
            time.sleep(0.2)

    def _hear_others(self) -> dict[int, dict[str, Any]]:
        """The words of the other ranks, when all have answered or time is up; asks late ones for stacks."""
        deadline = time.monotonic() + max(3.0, 6 * self._period)
        while True:
            others = self.record.others()
            silent = [(ranks.state(c), c["pid"]) for c in others.values() if not c["hang"]]
            if all(letter in ("T", "", "Z") for letter, _ in silent):
                return others
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for letter, pid in silent:
            if letter in ("R", "S", "D"):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(2)
        return self.record.others()


def _outwards(frame) -> Iterable[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _where(frames: list[Any]) -> str:
    """The innermost frame, and our innermost frame if that is another."""
    if not frames:
        return "compiled code"
    ours = [frame for frame in frames if frame.f_globals.get("__name__", "").startswith("megatron_vlm.")]
    named = list(dict.fromkeys([frames[0], *ours[:1]]))
    return ", called by ".join(
        f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        for frame in named
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
