"""Adapters equal peft's, in every layout, on every family: logits, loss and gradients, fp32 on CPU."""

from __future__ import annotations

import functools

import adapter_parity
import parity
import pytest
import torch
from test_parity import write_report

from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """All measurements of a family; WRITE_REPORTS=1 puts them into reports/parity.json."""
    return functools.cache(lambda family: measure(family, tmp_path_factory.mktemp(family)))


def measure(family, folder) -> list[dict]:
    path, cases, found = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "cases.pt", []
    torch.save(adapter_parity.cases(path, folder), cases)
    for processes in (1, 2):
        names = [n for n in adapter_parity.layouts_of(family) if adapter_parity.LAYOUTS[n][0] == processes]
        measured = run_distributed(
            processes, adapter_parity.measure, names, str(path), str(cases), timeout=900
        )
        found += [{"family": family} | row for row in measured[0]]
    write_report(family, found)
    return found


CELLS = [
    pytest.param(family, layout, marks=parity.marks(family))
    for family in TINY_FAMILIES
    for layout in adapter_parity.layouts_of(family)
]


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_equals_peft(rows_of, family, layout):
    mine = [row for row in rows_of(family) if row["layout"] == layout]
    assert [row["input"] for row in mine] == [*adapter_parity.INPUTS, *adapter_parity.PACKED]
    for row in mine:
        assert row["passed"], row
