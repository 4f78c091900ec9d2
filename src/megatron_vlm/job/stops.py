"""A run ends early, with a checkpoint, when it is asked to: by a scheduler's warning or `train.stop_after`.

SIGUSR1, and SIGTERM while steps are trained, are only noted. Each rank adds what it has noted to the figures
that all ranks sum in every step, so all of them know it at the end of the same step, whichever was asked.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from megatron_vlm.config import seconds_in
from megatron_vlm.job import watchdog

STOPPED_CODE = os.EX_TEMPFAIL  # 75: the same command, started again, goes on
WAYS = ("SIGTERM", "SIGUSR1", "train.stop_after")  # in which a run is asked to stop
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
AGAIN_AFTER = 3.0  # seconds; a SIGTERM sooner after another is the same: `timeout` sends two

STARTED = "MEGATRON_VLM_STARTED"  # when the user's command with `--nproc` began, in seconds since the epoch

started = time.time()  # of this process
_noted: dict[str, float] = {}  # way: when it was noted first
_ends = math.inf  # when `train.stop_after` is over


class Stopped(SystemExit):
    """A run has ended early, as it was asked to; its checkpoint is saved. Its code is STOPPED_CODE."""

    def __init__(self, step: int, steps: int, by: str):
        super().__init__(STOPPED_CODE)
        self.text = (
            f"stopped after step {step} of {steps} by {by}, with a checkpoint; "
            "start the same command again to go on."
        )

    def __str__(self) -> str:
        return self.text


def expect_warnings() -> None:
    """From now on, SIGUSR1 does not end this process: `asked` tells of it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _Note(os.getpid()))


@contextlib.contextmanager
def note_sigterm(stop_after: str | None = None) -> Iterator[None]:
    """Within the block, SIGTERM is noted, too.

    So is the end of `stop_after`, a time as `config.seconds_in` reads it. It counts from the start of the
    user's command, also in ranks that `--restarts` started.
    """
    global _ends
    _ends = math.inf
    if stop_after is not None:
        _ends = seconds_in(stop_after) + float(os.environ.get(STARTED, started))
    main = threading.current_thread() is threading.main_thread()
    if main:
        expect_warnings()
        before = signal.signal(signal.SIGTERM, _Note(os.getpid()))
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
        _noted.clear()


def stop_flags() -> list[bool]:
    """For each of WAYS, whether this rank was asked to stop."""
    if time.time() >= _ends:
        _noted.setdefault("train.stop_after", _ends)
    return [way in _noted for way in WAYS]


class _Note:
    """A handler that notes signals to the process `owner`. Others are processes forked from it, which it ends
    or spares as if there were no handler."""

    def __init__(self, owner: int):
        self.owner = owner

    def __call__(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            _noted.setdefault(name, time.monotonic())
        elif os.getpid() != self.owner or self._is_final(name):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_final(self, name: str) -> bool:
        """Whether it was sent again, or by torchrun after another rank has ended."""
        now = time.monotonic()
        if now - _noted.setdefault(name, now) > AGAIN_AFTER:
            return True
        return (watched := watchdog.watch()) is not None and watched.has_another_ended()
