"""What every test file costs: the longest are begun first, so that none is left when the others are done, and
the dearest are told at the end.

`WRITE_COSTS=1 make test` and `WRITE_COSTS=1 make test-long` measure the seconds again, on an idle machine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("costs.json")  # which tests are run -> file -> seconds
UNKNOWN = 1e9  # a new file may be a long one

TOLD = 10
PROPERTY = "processor seconds"

_seconds: Counter[str] = Counter()
_processor_seconds: Counter[str] = Counter()
_used_before = 0.0
_ends_a_file = True


def longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts tests by the seconds of their files; those of a file stay as they are."""
    global _used_before
    _used_before = used_by(os.getpid())  # by imports
    known = json.loads(FILE.read_text()).get(config.option.markexpr, {})
    items.sort(key=lambda item: -known.get(item.path.name, UNKNOWN))


def ends_a_file(ends: bool) -> None:
    """Says whether the test that begins is the last of its file."""
    global _ends_a_file
    _ends_a_file = ends


def measure(report: pytest.TestReport) -> None:
    """Adds to the last report of a file what all processes have used since the file before. Looking at them
    takes milliseconds."""
    global _used_before
    if report.when == "teardown" and _ends_a_file:
        used = used_by(os.getpid())
        report.user_properties.append((PROPERTY, used - _used_before))
        _used_before = used


def used_by(process: int) -> float:
    """Processor seconds of a process, its living descendants, and those that ended and were waited for."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        threads = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime and cstime
    return own + sum(used_by(int(child)) for children in threads for child in children.split())


def count(report: pytest.TestReport) -> None:
    name = Path(report.nodeid.partition("::")[0]).name
    _seconds[name] += report.duration
    _processor_seconds[name] += (
        dict(report.user_properties).get(PROPERTY, 0.0) if report.when == "teardown" else 0
    )


def tell(terminal: pytest.TerminalReporter) -> None:
    """The files that took the most of the processors' time."""
    if not _processor_seconds:
        return
    terminal.section("processor seconds, and seconds")
    for name, used in _processor_seconds.most_common(TOLD):
        terminal.line(f"{used:7.1f} {_seconds[name]:7.1f}  {name}")
    files = len(_processor_seconds)
    terminal.line(f"{_processor_seconds.total():7.1f} {_seconds.total():7.1f}  all {files} files")


def write(config: pytest.Config) -> None:
    """If it is asked for, and where the reports of all workers come together."""
    if os.environ.get("WRITE_COSTS") and not hasattr(config, "workerinput"):
        costs, selected = json.loads(FILE.read_text()), config.option.markexpr
        files = {file.name for file in FILE.parent.rglob("test_*.py")}
        known = {name: old for name, old in costs.get(selected, {}).items() if name in files}
        found = known | {name: round(seconds, 1) for name, seconds in _seconds.items()}
        costs[selected] = dict(sorted(found.items(), key=lambda each: -each[1]))
        FILE.write_text(json.dumps(costs, indent=1) + "\n")
