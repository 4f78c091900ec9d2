"""Puts a check's table into reports/gpu.json, and from there into the README and docs/reference/gpu.md."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from gpu_check.parts import PARTS
from gpu_check.rows import LOG_TAIL

ROOT = Path(__file__).resolve().parent.parent.parent
REPORT = "reports/gpu.json"
REGIONS = ("gpu_box", "gpu")
LATER = "in a checkout, `python tools/gpu_check --record {folder}` puts this table into its pages"


def record(folder: Path, parts: Container[str] = PARTS, root: Path = ROOT) -> str:
    """Return what was done. Of the table, these parts replace what the report has of them."""
    table = json.loads((folder / "gpu_check.json").read_text())
    if table["about"].get("card", "none").startswith("none"):
        return "not recorded: the table is of no card, or lacks the part `environment`, which names it"
    if not (root / REPORT).exists():
        return LATER.format(folder=folder)
    import tables  # beside this folder in a checkout, not in a bundle

    report = json.loads((root / REPORT).read_text())
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        if row["part"] in parts and row["value"] != "left out":
            what = row["what"].partition(LOG_TAIL)[0]  # a log has the machine's paths
            rows_of.setdefault(row["part"], []).append(row | {"what": what})
    report["parts"] |= {
        part: {"about": table["about"], "rows": rows}
        for part, rows in rows_of.items()
        if any(not row["what"].startswith("the whole part") for row in rows)
    }
    (root / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name in REGIONS:
        page = root / tables.TABLES[name][1].relative_to(tables.ROOT)
        text = tables.replaced(page.read_text(encoding="utf-8"), tables.TABLES[name][2](report), name)
        page.write_text(text, encoding="utf-8")
    return f"recorded in {REPORT}, README.md and docs/reference/gpu.md"
