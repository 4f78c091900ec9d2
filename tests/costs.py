"""How long every test file takes: the longest are begun first, so that none is left when the others are done.

`WRITE_COSTS=1 make test` and `WRITE_COSTS=1 make test-long` measure it again, on an idle machine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("costs.json")  # which tests are run -> file -> seconds
UNKNOWN = 1e9  # a new file may be a long one

_seconds: Counter[str] = Counter()


def longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts tests by the seconds of their files; those of a file stay as they are."""
    known = json.loads(FILE.read_text()).get(config.option.markexpr, {})
    items.sort(key=lambda item: -known.get(item.path.name, UNKNOWN))


def count(report: pytest.TestReport) -> None:
    _seconds[Path(report.nodeid.partition("::")[0]).name] += report.duration


def write(config: pytest.Config) -> None:
    """If it is asked for, and where the reports of all workers come together."""
    if os.environ.get("WRITE_COSTS") and not hasattr(config, "workerinput"):
        costs, selected = json.loads(FILE.read_text()), config.option.markexpr
        known = {name: old for name, old in costs.get(selected, {}).items() if FILE.with_name(name).exists()}
        found = known | {name: round(seconds, 1) for name, seconds in _seconds.items()}
        costs[selected] = dict(sorted(found.items(), key=lambda each: -each[1]))
        FILE.write_text(json.dumps(costs, indent=1) + "\n")
