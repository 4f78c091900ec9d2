"""Equal to Transformers under every layout: logits, loss and the gradient of every parameter, fp32 on CPU."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import parity
import pytest
import torch

from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

REPORT = Path(__file__).parents[1] / "reports" / "parity.json"


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """All measurements of a family; WRITE_REPORTS=1 puts them into reports/parity.json."""
    return functools.cache(lambda family: measure(family, tmp_path_factory.mktemp(family)))


def measure(family: str, folder: Path) -> list[dict]:
    path, cases, found = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "cases.pt", []
    torch.save(parity.cases_of(family, path), cases)
    for processes in (1, 2, 4):
        names = [name for name in parity.layouts_of(family) if parity.LAYOUTS[name][0] == processes]
        arguments = (names, str(path), str(cases))
        measured = run_distributed(processes, parity.measure, *arguments, timeout=1200)[0]
        found += [{"family": family} | row for row in measured]
    write_report(family, found, adapters=False)
    return found


def write_report(family: str, found: list[dict], adapters: bool) -> None:
    """Puts the measurements of a family, with adapters or without, in the place of the earlier ones."""
    if os.environ.get("WRITE_REPORTS"):
        rows = json.loads(REPORT.read_text()) if REPORT.exists() else []
        others = [row for row in rows if (row["family"], "adapter" in row["layout"]) != (family, adapters)]
        REPORT.write_text(json.dumps(others + found, indent=1, ensure_ascii=False) + "\n")


CELLS = [
    pytest.param(family, layout, marks=parity.marks(family))
    for family in TINY_FAMILIES
    for layout in parity.layouts_of(family)
]


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_equals_transformers(rows_of, family, layout):
    mine = [row for row in rows_of(family) if row["layout"] == layout]
    assert [row["input"] for row in mine] == [*parity.inputs_of(family), *parity.PACKED]
    for row in mine:
        assert row["passed"], row
