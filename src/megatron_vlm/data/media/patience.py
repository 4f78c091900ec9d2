"""Decodes a medium within a set time, or its sample is dropped: a damaged clip can cost FFmpeg hours.

Decoding happens in a thread. If it is late, the worker abandons it and goes on with another. A check between
frames would not be enough: the time may pass within one call of FFmpeg or Pillow. These let other threads run
meanwhile.
"""

import math
import os
import threading
from collections.abc import Callable
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample

# Seconds of one wait. However long a process was stopped, it loses at most one of these.
SLICE = 1.0

_late: set[int] = set()  # hashes of files that were late
_of_caller = threading.local()  # holds the decoding thread of the calling thread


def call_with_timeout(seconds: float, decode: Callable, medium: Any, *args: Any) -> Any:
    """`decode(medium, *args)` for a file or a list of frames. Raises what that call raises, and BadSample
    `decode_timeout` after `seconds`.

    A file that was late is refused at once when this process sees it again.
    """
    is_file = isinstance(medium, bytes)
    if is_file and _late and hash(medium) in _late:
        raise BadSample("decode_timeout", f"{len(medium)} bytes, not decoded in {seconds:g} seconds before")
    thread = getattr(_of_caller, "thread", None)
    if thread is None or thread.is_late:
        thread = _of_caller.thread = _DecodingThread()
    try:
        return thread.call(seconds, decode, medium, *args)
    except _Late as late:
        if is_file:
            _late.add(hash(medium))
        size = f"{len(medium)} {'bytes' if is_file else 'frames'}" if hasattr(medium, "__len__") else ""
        raise BadSample("decode_timeout", f"{size}, not decoded in {seconds:g} seconds") from late


def exit_if_abandoned() -> None:
    """Ends the calling thread if nobody waits for it any more. Decoders call this in their loops."""
    if getattr(threading.current_thread(), "is_late", False):
        raise _Late


class _Late(Exception):
    pass


class _DecodingThread(threading.Thread):
    """Makes the calls that it is given, one at a time, until it is abandoned."""

    def __init__(self) -> None:
        super().__init__(name="decode", daemon=True)
        self.is_late = False
        self._called, self._returned = threading.Lock(), threading.Lock()
        self._called.acquire()
        self._returned.acquire()
        self.start()

    def call(self, seconds: float, function: Callable, *args: Any) -> Any:
        """The function's result. Raises _Late, and what the function raises."""
        self._call = function, args
        self._called.release()
        slices, returned = math.ceil(seconds / SLICE), False
        try:
            returned = any(self._returned.acquire(timeout=seconds / slices) for _ in range(slices))
        finally:
            self.is_late = not returned  # also when Ctrl-C ends the wait
        if self.is_late:
            raise _Late
        (value, error), self._outcome = self._outcome, None
        if error is not None:
            raise error
        return value

    def run(self) -> None:
        while not self.is_late:
            self._called.acquire()
            (function, args), self._call = self._call, None
            try:
                self._outcome = function(*args), None
            except BaseException as error:  # noqa: BLE001  `call` raises it again
                self._outcome = None, error
            del function, args
            self._returned.release()


# threads do not survive a fork: the new process must start its own
os.register_at_fork(after_in_child=lambda: _of_caller.__dict__.clear())
