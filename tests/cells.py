"""How many cells of a test each suite has: `python tests/cells.py` prints the table."""

from __future__ import annotations

import contextlib
import io
from collections import Counter

import pytest

SUITES = ("test", "test-long", "test-soak")


class Cells:
    """A plugin of pytest that counts what it collects: (file, test) -> suite -> cells."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Counter[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            counts = self.found.setdefault((item.path.name, item.name.partition("[")[0]), Counter())
            counts[suite_of(item)] += 1


def suite_of(item: pytest.Item) -> str:
    if item.get_closest_marker("soak"):
        return "test-soak"
    return "test-long" if item.get_closest_marker("long") else "test"


def table(found: dict[tuple[str, str], Counter[str]]) -> str:
    """The tests that have cells in `make test-soak` and elsewhere."""
    lines = [f"| test | {' | '.join(SUITES)} |", "| --- | --- | --- | --- |"]
    for (file, test), counts in sorted(found.items()):
        if counts["test-soak"] and len(counts) > 1:
            cells = " | ".join(str(counts[suite]) if counts[suite] else "" for suite in SUITES)
            lines.append(f"| `{file}` {test.removeprefix('test_').replace('_', ' ')} | {cells} |")
    total = sum(found.values(), Counter())
    lines.append(f"| all tests | {' | '.join(str(total[suite]) for suite in SUITES)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    cells = Cells()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[cells])
    print(table(cells.found))
