"""Equal to Transformers under every layout: logits, loss and the gradient of every parameter, fp32 on CPU."""

from __future__ import annotations

import parity
import pytest


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(request, tmp_path_factory, parity.LAYOUTS, parity.cases_of, parity.measure)


def inputs_of(family: str) -> list[str]:
    return [*parity.inputs_of(family), *parity.PACKED]


CELLS = parity.cells_of_pairs(parity.layouts_of, inputs_of, parity.OFTEN)


@pytest.mark.parametrize(("family", "layout", "inputs"), CELLS)
def test_equals_transformers(rows_of, family, layout, inputs):
    processes = parity.LAYOUTS[layout][0]
    mine = [row for row in rows_of(processes) if (row["family"], row["layout"]) == (family, layout)]
    assert {row["input"] for row in mine} >= {*inputs}
    for row in mine:
        assert row["passed"], row
