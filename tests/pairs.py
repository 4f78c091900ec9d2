"""Which of many combinations are tried how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def pairs(
    rows: Sequence, columns: Sequence, cells: Sequence[tuple], without: Iterable[tuple] = ()
) -> Iterator[Any]:
    """Every row with every column, and with each of them one cell in turn, so that rows and columns meet all
    kinds of cells: every second of them in `make test`, the others in `make test-long`. `make test-soak` has
    every row and column with every cell.
    """
    for number, row in enumerate(rows):
        for place, column in enumerate(columns):
            if (row, column) in without:
                continue
            first = pytest.mark.long if (number + place) % 2 else ()
            for position, cell in enumerate(cells):
                turn = (position - number - place) % len(cells)
                yield pytest.param(row, column, *cell, marks=pytest.mark.soak if turn else first)
