"""Write reports/parity.json, which the tests produce, into the README as a table.

python tools/parity_table.py            rewrite the table
python tools/parity_table.py --check    exit 1 when README.md does not show the report's numbers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"
NUMBERS = ("max_abs_logits", "abs_loss", "max_rel_grad")
HEAD = "| family | layout | inputs | logits, abs | loss, abs | gradients, rel | worst parameter |"


def table(rows: list[dict]) -> str:
    """One line per family and layout with the worst number over its inputs; a failed one is marked."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["family"], row["layout"]), []).append(row)
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    return "\n".join(lines + [line(*key, group) for key, group in groups.items()])


def line(family: str, layout: str, rows: list[dict]) -> str:
    inputs = ", ".join(dict.fromkeys(row["input"] for row in rows))
    worst = [f"{max(row[number] for row in rows):.1e}" for number in NUMBERS]
    parameter = max(rows, key=lambda row: row["max_rel_grad"])["worst_parameter"]
    mark = "" if all(row["passed"] for row in rows) else " **failed**"
    return f"| {family}{mark} | {layout} | {inputs} | {' | '.join(worst)} | `{parameter}` |"


def replaced(readme: str, new_table: str, begin_mark: str = BEGIN, end_mark: str = END) -> str:
    """The README with what stands between the markers replaced. Raises ValueError without the markers."""
    before, begin, rest = readme.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end):
        raise ValueError(f"README.md: no {begin_mark} … {end_mark}; put both where the table belongs.")
    return f"{before}{begin}\n{new_table}\n{end}{after}"


def main() -> None:
    report, readme = ROOT / "reports" / "parity.json", ROOT / "README.md"
    if not report.exists():
        print("no reports/parity.json: nothing to show yet; `make test` writes it")
        return
    old = readme.read_text(encoding="utf-8")
    new = replaced(old, table(json.loads(report.read_text(encoding="utf-8"))))
    if "--check" not in sys.argv:
        readme.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit("README.md does not show the numbers of reports/parity.json; run tools/parity_table.py")


if __name__ == "__main__":
    main()
