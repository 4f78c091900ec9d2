"""A process beside another: it says why that ended, if it could not say so itself, and ends it if it is held.

A crash in compiled code, a kill, and code that never lets the interpreter go leave no time for Python. The
guard needs nothing of the process that it guards. faulthandler writes stacks to it, through a socket so small
that the crash waits until the reason is on the screen. Of a rank that ended, its launcher speaks instead, see
`ranks.last_words`.

It ends a process whose watchdog has not looked for too long. It counts its own waits and not the clock, and
none while the process is stopped: so time in which either of them could not run is not counted.
"""

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator

from megatron_vlm.job import ranks
from megatron_vlm.job.ranks import LAUNCHER_SPEAKS, STACKS, by_signal, held, say

# as faulthandler calls them
_CRASHES = {"Segmentation fault": signal.SIGSEGV, "Bus error": signal.SIGBUS, "Aborted": signal.SIGABRT}
_CRASHES |= {"Illegal instruction": signal.SIGILL, "Floating": signal.SIGFPE}
_SPEAKS_AFTER = 0.05  # seconds, in which the first line has come
_LOOKS = 20  # times within the longest silence
_WRITES_FOR = 1  # seconds, in which stacks are in their file

_started: list[tuple[ranks.RankFile, int]] = []  # the record of this process's guard, and the way to it


def start(record: ranks.RankFile, stacks: int | None = None, most_silence: float = math.inf) -> int | None:
    """Start the guard of this process, which ends with it, in place of an earlier one. `most_silence` are
    seconds between looks of the watchdog.

    What faulthandler writes to the returned descriptor goes to the descriptor `stacks`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # nothing else ends a rank whose torchrun was killed
        end_with_parent(int(os.environ.get(LAUNCHER_SPEAKS, os.getppid())))
    while _started:
        earlier, way = _started.pop()
        earlier.end("done", "")
        os.close(way)  # so that it ends, too
    try:
        guarded = os.pidfd_open(os.getpid())
    except OSError:  # Linux before 5.3, or a container that forbids it: there is no guard
        return None
    ours, heard = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes its least, some 4 KB
    if (between := os.fork()) == 0:
        try:
            os.setsid()
            if os.fork() == 0:  # nobody's child, so that nobody waits for it or takes it for a data worker
                ours.close()
                _attend(record, heard, guarded, stacks, most_silence)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    heard.close()
    os.close(guarded)
    _started.append((record, ours.detach()))  # it stays open as long as this process lives
    return _started[0][1]


def end_with_parent(parent: int) -> None:
    """From now on the kernel ends this process, also a stopped one, with `parent`, which has started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux's PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """A guard says why this process ended within the block, where no watchdog does."""
    record = ranks.RankFile(None)
    record.write(doing="the command ran")
    if (to_guard := start(record)) is not None:
        faulthandler.enable(to_guard)
    os.register_at_fork(after_in_child=faulthandler.disable)  # its parent speaks of a worker
    try:
        yield
    finally:
        record.end("done", "")


def dismiss() -> None:
    """The guard says nothing of how this process ends, which tells it itself."""
    for record, _ in _started:
        record.end("done", "")


def _attend(
    record: ranks.RankFile, heard: socket.socket, guarded: int, stacks: int | None, most_silence: float
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if _waits_too_long(record, heard, guarded, most_silence):
        signal.pidfd_send_signal(guarded, signal.SIGUSR2)  # faulthandler writes the stacks
        time.sleep(_WRITES_FOR)
        record.content = record.read()  # which the other process has written, and can no longer
        message = f"megatron-vlm: {held(record.content, most_silence)}"
        record.end("hang", message)
        if record.claim():
            say(message)
        signal.pidfd_send_signal(guarded, signal.SIGKILL)
        _end_beside(record)
        return
    first = ""
    if heard in select.select([heard, guarded], [], [])[0] and heard.recv(1, socket.MSG_PEEK):
        time.sleep(_SPEAKS_AFTER)
        first = heard.recv(256, socket.MSG_PEEK).decode(errors="replace")
    content = record.read()
    if not content["ended"] and ranks.world_size() == 1:
        who = f"process {content['pid']}"
        number = next((number for name, number in _CRASHES.items() if name in first), None)
        place = STACKS
        if number and stacks is None:
            stacks, place = tempfile.mkstemp(prefix="megatron-vlm-", suffix=".txt")
        say(f"megatron-vlm: {by_signal(who, number, content, place)}")
    while heard in select.select([heard, guarded], [], [])[0] and (stack := heard.recv(1 << 16)):
        if stacks is not None:
            os.write(stacks, stack)
    _end_beside(record)


def _end_beside(record: ranks.RankFile) -> None:
    for group in record.read()["beside"]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _waits_too_long(record: ranks.RankFile, heard: socket.socket, guarded: int, most_silence: float) -> bool:
    """Waits until the process ends or crashes; or until its watchdog did not look for longer: then True."""
    period = None if most_silence == math.inf else most_silence / _LOOKS
    last_look = None
    silence = 0.0
    while not select.select([heard, guarded], [], [], period)[0]:
        try:
            content = record.read()
        except json.JSONDecodeError:  # it is being written
            continue
        stopped = content["ended"] or ranks.process_state(content["pid"]) == "T"
        silence = 0.0 if stopped or content["looked"] != last_look else silence + period
        last_look = content["looked"]
        if silence > most_silence:
            return True
    return False
