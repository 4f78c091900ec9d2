"""Which of many combinations are tried how often."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
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


def covering(cells: Iterable[Any], shows: Callable[[Any], set[Hashable]]) -> list[Any]:
    """Few of the cells that together show all that every cell shows, in the order of `cells`. The next one is
    always the first of those that show the most that is new, so equal cells give equal choices.
    """
    left = [(number, cell, shows(cell)) for number, cell in enumerate(cells)]
    chosen = []
    while left:
        number, cell, best = max(left, key=lambda each: len(each[2]))
        chosen.append((number, cell))
        left = [(n, other, new) for n, other, shown in left if (new := shown - best)]
    return [cell for _, cell in sorted(chosen, key=lambda each: each[0])]


def pairs_of(cell: Sequence[Hashable]) -> set[Hashable]:
    """All pairs of a cell's values, each value with its place: for `covering`."""
    return set(combinations(enumerate(cell), 2))
