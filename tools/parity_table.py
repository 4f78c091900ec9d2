"""Write reports/parity.json, which the tests produce, into the README as a table.

python tools/parity_table.py            rewrite the table
python tools/parity_table.py --check    exit 1 when README.md does not show the report's numbers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ("max_abs_logits", "abs_loss", "max_rel_grad")
HEAD = "| family | layouts | inputs | logits, abs | loss, abs | gradients, rel |"


def table(rows: list[dict]) -> str:
    """A line for each family with the worst number over its layouts and inputs; a failed one is marked."""
    families: dict[str, list[dict]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    return "\n".join(lines + [line(family, group) for family, group in families.items()])


def line(family: str, rows: list[dict]) -> str:
    layouts, inputs = (", ".join(dict.fromkeys(row[kind] for row in rows)) for kind in ("layout", "input"))
    worst = [f"{max(row[number] for row in rows):.1e}" for number in NUMBERS]
    mark = "" if all(row["passed"] for row in rows) else " **failed**"
    return f"| {family}{mark} | {layouts} | {inputs} | {' | '.join(worst)} |"


def replaced(page: str, new_table: str, name: str = "parity") -> str:
    """The page with what stands between the table's markers replaced. Raises ValueError without them."""
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"no {first} … {last}; put both where the table belongs.")
    return f"{before}{first}\n{new_table}\n{last}{after}"


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
