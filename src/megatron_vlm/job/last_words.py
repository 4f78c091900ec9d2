"""The message when a job has ended; its last line is the reason and the remedy."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron_vlm.messages import printable_lines

LAUNCHER_SPEAKS = "MEGATRON_VLM_LAUNCHER_SPEAKS"  # set for the ranks that --nproc starts
HANG_CODE = 3  # the exit code when no rank makes progress


def say(message: str) -> None:
    """Print the message, unless the launcher does it."""
    if message and not os.environ.get(LAUNCHER_SPEAKS):
        print(printable_lines(message), file=sys.stderr, flush=True)


def last_words(contents: dict[int, dict[str, Any]], codes: dict[int, int]) -> tuple[int, str]:
    """(exit code, message) for a job. `codes` are the ranks' exit codes other than 0, as their parent process
    saw them; `contents` is what the ranks said."""
    ended = {rank: content["ended"] for rank, content in contents.items() if content["ended"]}
    for kind in ("hang", "cause", "interrupt"):
        said = sorted((e["time"], rank) for rank, e in ended.items() if e["kind"] == kind and e["message"])
        if said:
            word = ended[said[0][1]]
            return word.get("code", HANG_CODE), word["message"]
    for rank, code in sorted(codes.items()):
        if code < 0 and -code != signal.SIGTERM and ended.get(rank, {}).get("kind") != "lost":
            return 128 - code, f"megatron-vlm: {_by_signal(rank, -code, contents.get(rank))}"
    for rank, code in sorted(codes.items()):
        if code > 0 and ended.get(rank, {}).get("kind") in (None, "done"):
            what = f"rank {rank} ended with code {code} and said nothing"
            return code, f"megatron-vlm: {what}; MEGATRON_VLM_DEBUG=1 says more."
    lost = sorted((e["time"], rank) for rank, e in ended.items() if e["kind"] == "lost")
    if lost:
        return ended[lost[0][1]]["code"], ended[lost[0][1]]["message"]
    rank = min(codes, default=0)  # torchrun sends SIGTERM to the others: it counts only without another cause
    return 128 + signal.SIGTERM, f"megatron-vlm: {_by_signal(rank, signal.SIGTERM, contents.get(rank))}"


def _by_signal(rank: int, number: int, content: dict[str, Any] | None) -> str:
    what = f"rank {rank} was ended by signal {number} ({signal.Signals(number).name})"
    doing = f" while {content['doing']}" if content else ""
    if number in (signal.SIGKILL, signal.SIGTERM):
        why = "something outside did it, most often for want of memory (see `dmesg`)"
    else:
        why = "it crashed in compiled code; its stacks are in errors/ of the run folder"
    return f"{what}{doing}: {why}.\nStart again to go on from the last checkpoint."


def interrupted(contents: list[dict[str, Any]], by: str = "Ctrl-C") -> str:
    """The line after Ctrl-C; empty if no run was active."""
    if not contents:
        return ""
    step = max(content["step"] for content in contents)
    return f"stopped by {by} after step {step}; start again to go on from the last checkpoint."
