"""How slow this machine is just now: limits on processor seconds are those of its usual speed."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

USUAL_SECONDS = 0.2  # for the imports below, where the limits were set


def processor_seconds() -> float:
    """Of all processes started and ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def slowness() -> float:
    """1 or more; measured again by every call."""
    before = processor_seconds()
    subprocess.run([sys.executable, "-c", "import typer, yaml, jinja2"], check=True)
    return max(1.0, (processor_seconds() - before) / USUAL_SECONDS)


def is_quick(take: Callable[[], float], limit: float) -> bool:
    """Whether `take`, which returns its processor seconds, stays below a limit in one of three tries.

    The least counts: other load, and children of other tests that end meanwhile, only ever add.
    """
    return take() < limit or any(take() < limit * slowness() for _ in range(2))
