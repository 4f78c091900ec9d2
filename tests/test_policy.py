"""A policy's log-probabilities, entropies and gradients are Transformers', however samples lie on ranks."""

from __future__ import annotations

import parity
import policy_cells
import pytest


def held(family, path):
    samples = policy_cells.samples_of(family, path)
    return samples, policy_cells.reference(path, samples)


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(request, tmp_path_factory, parity.LAYOUTS, held, policy_cells.measure)


@pytest.mark.parametrize(
    ("family", "layout"),
    parity.cells(parity.layouts_of, ("1 process", "TP2+SP"), parity.OF_EACH, ("gemma3",)),
)
def test_scores_and_gradients_are_those_of_transformers(rows_of, family, layout):
    rows = rows_of(parity.LAYOUTS[layout][0])
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert [row["max_tokens"] for row in found] == [1, 300]
    for row in found:
        assert row["log_probs"] <= 1e-5 and row["gradient"][0] <= 1e-4 and row["loss"] <= 1e-4, row
