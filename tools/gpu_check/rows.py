"""The rows of the table, and the files that hold them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MOST_OFF = 1 / 3  # of what was expected
LOG_TAIL = " ends with: "  # in a row, between the name of a log and its last lines


@dataclass(frozen=True)
class Row:
    """A line of the table. `limit` is the largest right value; without one the value is only shown, unless
    it is `wrong`. `expected` is what a model of time or memory says; the value may differ by a third."""

    part: str
    what: str
    value: float | str
    limit: float | None = None
    wrong: bool = False
    expected: float | None = None

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "WRONG" if self.wrong else ""
        return "ok" if self.value <= self.limit else "WRONG"

    @property
    def shown(self) -> str:
        return self.value if isinstance(self.value, str) else f"{self.value:.4g}"

    @property
    def shown_expected(self) -> str:
        """What was expected, with a mark if the value is off by more than a third of it."""
        if not self.expected or isinstance(self.value, str):
            return ""
        is_off = not abs(self.value - self.expected) <= MOST_OFF * self.expected
        return f"{self.expected:.4g}" + f" OFF: {self.value / self.expected:.2g} times" * is_off

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"<= {self.limit:g}"
        expected = f"; expected {self.shown_expected}" if self.shown_expected else ""
        return f"{self.verdict:5}  {self.part:12} {self.shown:>12} {limit:10} {self.what}{expected}"


def add(folder: Path, row: Row) -> None:
    """Prints the row and puts it on the disk."""
    print(row, flush=True)
    with open(folder / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def without(folder: Path, parts: list[str]) -> None:
    """Leaves out the rows of these parts, which run again."""
    lines = [json.dumps(asdict(row)) + "\n" for row in read(folder) if row.part not in parts]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def read(folder: Path) -> list[Row]:
    """The rows so far. A line that a process was ended in the middle of is left out."""
    return list(_rows_of(folder / "rows.jsonl"))


def _rows_of(file: Path) -> Iterator[Row]:
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield Row(**json.loads(line))
        except json.JSONDecodeError:
            print(f"left out, as it is not whole: {line}", file=sys.stderr)


def write_tables(folder: Path, about: dict[str, str], order: list[str]) -> None:
    """gpu_check.json and gpu_check.md with all rows, parts in this order; `about` says when."""
    rows = sorted(read(folder), key=lambda row: order.index(row.part))
    about = about | {row.what: row.shown for row in rows if row.part == "environment"}
    listed = [asdict(row) | {"verdict": row.verdict} for row in rows]
    (folder / "gpu_check.json").write_text(json.dumps({"about": about, "rows": listed}, indent=1) + "\n")
    lines = ["# What this machine showed", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| part | what | value | expected | limit | verdict |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.part not in ("environment", "expected") or row.verdict:
            limit = "" if row.limit is None else f"{row.limit:g}"
            cells = (row.part, row.what, row.shown, row.shown_expected, limit, row.verdict)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    (folder / "gpu_check.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
