"""Gather the numbers of `make demo FAMILY=…` in reports/demo.json and write them into the README as a table.

python tools/demo_table.py            take the summaries of runs/demo*, rewrite report and table
python tools/demo_table.py --check    exit 1 when README.md does not show the report's numbers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parity_table import replaced

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"
HEAD = "| `FAMILY=` | layout | one digit | two digits | Megatron = exported | training | processor time |"


def gathered(report: dict[str, dict], runs: Path) -> dict[str, dict]:
    """The report with each family's summary found in `runs` over the one it had."""
    files = sorted(runs.glob("demo*/summary.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return dict(sorted({**report, **{summary["family"]: summary for summary in found}}.items()))


def table(report: dict[str, dict]) -> str:
    return "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(line, report.values())])


def line(summary: dict) -> str:
    cells = [
        f"`{summary['family']}`",
        summary["layout"],
        f"{summary['held_out_accuracy']:.1%}",
        f"{summary['held_out_read_two_accuracy']:.1%}",
        f"{summary['hf_agreement']:.1%}",
        f"{summary['train_seconds']:.0f} s",
        f"{summary['train_cpu_seconds']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    file, readme = ROOT / "reports" / "demo.json", ROOT / "README.md"
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    old = readme.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if replaced(old, table(report), BEGIN, END) != old:
            sys.exit("README.md does not show the numbers of reports/demo.json; run tools/demo_table.py")
        return
    report = gathered(report, ROOT / "runs")
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    readme.write_text(replaced(old, table(report), BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
