"""The message when a job has ended; its last line is the reason and the remedy."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from megatron_vlm.messages import printable_lines

LAUNCHER_SPEAKS = "MEGATRON_VLM_LAUNCHER_SPEAKS"  # set for the ranks that --nproc starts
HANG_CODE = 3  # the exit code when no rank makes progress
START_AGAIN = "start again: a run goes on from its last checkpoint, if it has saved one"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
_WHY = dict.fromkeys(
    _FROM_OUTSIDE,
    "something outside did it, most often for want of memory (see `dmesg`); fewer data workers or smaller "
    "buffers need less",
)
_WHY[signal.SIGBUS] = "a file that it reads became shorter or cannot be read any more, or /dev/shm is full"
# torchrun sends SIGTERM to all others when one rank ends, so this counts only without another reason
_BEST_FIRST = ("hang", "cause", "interrupt", "signal", "silence", "lost", "SIGTERM")


def say(message: str) -> None:
    """Print the message, unless the launcher does it."""
    if message and not os.environ.get(LAUNCHER_SPEAKS):
        print(printable_lines(message), file=sys.stderr, flush=True)


def last_words(contents: dict[int, dict[str, Any]], codes: dict[int, int]) -> tuple[int, str]:
    """(exit code, message) for a job. `codes` are the ranks' exit codes other than 0, as their parent process
    saw them; `contents` is what the ranks said."""
    every = sorted({*contents, *codes})
    reasons = [_reason(f"rank {rank}", contents.get(rank), codes.get(rank, 0)) for rank in every]
    *_, code, message = min(filter(None, reasons), key=lambda reason: reason[:2])
    return code, message


def _reason(who: str, content: dict[str, Any] | None, code: int) -> tuple[int, float, int, str] | None:
    """(place in _BEST_FIRST, time, exit code of the job, message) for a rank; None if it says nothing."""
    ended = content["ended"] if content else None
    if ended and ended["message"]:
        return _BEST_FIRST.index(ended["kind"]), ended["time"], ended.get("code", HANG_CODE), ended["message"]
    if code == 0:
        return None
    kind, said = "silence", f"{who} ended with code {code} and said nothing; MEGATRON_VLM_DEBUG=1 says more."
    if code < 0:
        kind, said = "SIGTERM" if -code == signal.SIGTERM else "signal", by_signal(who, -code, content)
        code = 128 - code
    elif content and not ended and time.time() - content["looked"] > content["hang_seconds"]:
        code, said = HANG_CODE, held(who, content, ", or was stopped for so long")
    return _BEST_FIRST.index(kind), 0.0, code, f"megatron-vlm: {said}"


def by_signal(who: str, number: int | None, content: dict[str, Any] | None) -> str:
    """The last words of a process that a signal has ended; None: nobody knows which signal."""
    signalled = f"was ended by signal {number} ({signal.Signals(number).name})" if number else "is no more"
    doing = f" while {content['doing']}" if content else ""
    stacks = "; its stacks are in errors/ of the run folder" if number not in (None, *_FROM_OUTSIDE) else ""
    why = _WHY.get(number or signal.SIGKILL, "it crashed in compiled code")
    return f"{who} {signalled}{doing}: {why}{stacks}.\n{START_AGAIN.capitalize()}."


def held(who: str, content: dict[str, Any], or_else: str = "") -> str:
    """The last words of a process that faulthandler ended, as its interpreter could not run for too long."""
    where = f"{who} let no other code run for {content['hang_seconds']:g} s while {content['doing']}{or_else}"
    return f"{where}; its stacks are in errors/ of the run folder.\n{START_AGAIN.capitalize()}."


def interrupted(contents: list[dict[str, Any]], by: str) -> str:
    """The line after Ctrl-C or a signal; empty after Ctrl-C if no run was active."""
    if not contents:
        return "" if by == "Ctrl-C" else f"stopped by {by}."
    step = max(content["step"] for content in contents)
    return f"stopped by {by} after step {step}; {START_AGAIN}."
