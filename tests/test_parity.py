"""Equal to Transformers under every layout: logits, loss and the gradient of every parameter, fp32 on CPU."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import parity
import pytest
import torch

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

REPORT = Path(__file__).parents[1] / "reports" / "parity.json"


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    """The measurements of a family in the layouts of so many processes; WRITE_REPORTS=1 puts them into
    reports/parity.json.
    """

    @functools.cache
    def prepared(family: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(family)
        path, cases = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "cases.pt"
        torch.save(parity.cases_of(family, path), cases)
        return path, cases

    @functools.cache
    def rows(family: str, processes: int) -> list[dict]:
        path, cases = prepared(family)
        arguments = parity.asked_for(request, family, processes, parity.LAYOUTS), str(path), str(cases)
        measured = run_distributed(processes, parity.measure, *arguments, timeout=1200)[0]
        found = [{"family": family} | row for row in measured]
        write_report(family, found)
        return found

    return rows


def write_report(family: str, found: list[dict]) -> None:
    """Puts the measurements of a family in the place of the earlier ones in the same layouts."""
    if os.environ.get("WRITE_REPORTS"):
        rows = json.loads(REPORT.read_text()) if REPORT.exists() else []
        layouts = {row["layout"] for row in found}
        others = [row for row in rows if row["family"] != family or row["layout"] not in layouts]
        REPORT.write_text(json.dumps(others + found, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(("family", "layout"), parity.cells(parity.layouts_of, parity.OFTEN, parity.OF_EACH))
def test_equals_transformers(rows_of, family, layout):
    processes = parity.LAYOUTS[layout][0]
    mine = [row for row in rows_of(family, processes) if row["layout"] == layout]
    assert [row["input"] for row in mine] == [*parity.inputs_of(family), *parity.PACKED]
    for row in mine:
        assert row["passed"], row
