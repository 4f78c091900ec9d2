"""Which of many combinations are tried how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def pairs(
    rows: Sequence, columns: Sequence, cells: Sequence[tuple], without: Iterable[tuple] = ()
) -> Iterator[Any]:
    """Every row with every column, and with each of them one cell in turn, so that rows and columns meet all
    kinds of cells. `make test-long` has another cell of each, and `make test-soak` the rest.
    """
    for number, row in enumerate(rows):
        for place, column in enumerate(columns):
            if (row, column) in without:
                continue
            for position, cell in enumerate(cells):
                turn = (position - number - place) % len(cells)
                mark = () if turn == 0 else pytest.mark.long if turn == len(cells) // 2 else pytest.mark.soak
                yield pytest.param(row, column, *cell, marks=mark)
