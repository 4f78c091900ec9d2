"""A token goes to the experts that its sample says, in every layout, and the router learns from it."""

from __future__ import annotations

import parity
import pytest
import route_cells

FAMILIES = ["qwen3_vl_moe", "glm4v_moe"]


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(
        request, tmp_path_factory, route_cells.LAYOUTS, route_cells.cases, route_cells.measure
    )


def cells() -> list:
    marks = {1: pytest.mark.long, 2: pytest.mark.long, 4: pytest.mark.soak}
    return [
        pytest.param(family, layout, marks=marks[route_cells.LAYOUTS[layout][0]])
        for family in FAMILIES
        for layout in route_cells.LAYOUTS
    ]


@pytest.mark.parametrize(("family", "layout"), cells())
def test_given_experts_are_taken_as_by_transformers(rows_of, family, layout):
    rows = rows_of(route_cells.LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["moved"] > 1e-2 and row["router gradient"] > 0, "the test sees nothing"
    assert row["log_probs"] <= 1e-5 and row["gradient"][0] <= 1e-4 and row["loss"] <= 1e-4, row


@pytest.mark.parametrize(("family", "layout"), cells())
def test_own_experts_are_recorded_and_replayed_to_the_bit(rows_of, family, layout):
    """In the reversed order, too; and the first ratio is 1."""
    rows = rows_of(route_cells.LAYOUTS[layout][0])
    [row] = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert row["layers"] > 0 and row["other experts"] == 0, row
    assert row["replayed alike"] and row["ratio"] == 1, row
