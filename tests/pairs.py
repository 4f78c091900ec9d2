"""Which of many combinations are tried how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def pairs(
    rows: Sequence, columns: Sequence, cells: Sequence[tuple], without: Iterable[tuple] = ()
) -> Iterator[Any]:
    """Every row with every column, and with each of them one cell in turn, so that rows and columns meet all
    kinds of cells: every second of them in `make test`, which have another cell in `make test-long`, and the
    others there. `make test-soak` has the rest.
    """
    for number, row in enumerate(rows):
        for place, column in enumerate(columns):
            if (row, column) in without:
                continue
            marks = {0: (), len(cells) // 2: pytest.mark.long}
            if (number + place) % 2:
                marks = {0: pytest.mark.long}
            for position, cell in enumerate(cells):
                turn = (position - number - place) % len(cells)
                yield pytest.param(row, column, *cell, marks=marks.get(turn, pytest.mark.soak))
