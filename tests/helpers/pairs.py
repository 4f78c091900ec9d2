"""Which of many combinations are tried how often."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(
    rows: Sequence, columns: Sequence, cells: Sequence[tuple], without: Iterable[tuple] = ()
) -> Iterator[Any]:
    """Every row with every column, and with each of them one cell in turn, so that rows and columns meet all
    kinds of cells: a fifth of them in `make test` and another fifth in `make test-long`. `make test-soak` has
    every row and column with every cell.
    """
    for number, row in enumerate(rows):
        for place, column in enumerate(columns):
            if (row, column) in without:
                continue
            first = {0: (), 2: pytest.mark.long}.get((number - place) % 5, pytest.mark.soak)
            for position, cell in enumerate(cells):
                turn = (position - number - place) % len(cells)
                yield pytest.param(row, column, *cell, marks=pytest.mark.soak if turn else first)


def first_soon(values: Iterable[Any], soon: int = 1) -> list:
    """The first `soon` values in `make test`, and the others in `make test-soak`."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if place < soon else pytest.mark.soak
        )
        for place, value in enumerate(values)
    ]


def covering(cells: Iterable[Any], shows: Callable[[Any], set[Hashable]]) -> list[Any]:
    """Few of the cells that together show all that every cell shows, in the order of `cells`.

    The next one is always the first of those that show the most that is new, so equal cells give an equal
    choice. What a cell adds only becomes less, so it is counted again only where it seems to be the most.
    """
    every = list(cells)
    waiting = [(-len(shows(cell)), number) for number, cell in enumerate(every)]
    heapq.heapify(waiting)
    seen: set[Hashable] = set()
    chosen = []
    while waiting:
        _, number = heapq.heappop(waiting)
        new = shows(every[number]) - seen
        if new and waiting and (-len(new), number) > waiting[0]:
            heapq.heappush(waiting, (-len(new), number))
        elif new:
            seen |= new
            chosen.append(number)
    return [every[number] for number in sorted(chosen)]


def pairs_of(values: Iterable[Hashable]) -> set[Hashable]:
    """All pairs of the values of a cell, each value with its place: for `covering`."""
    return set(combinations(enumerate(values), 2))


def pairwise(*factors: Sequence) -> list:
    """Every combination: each value of a factor in `make test`, each two values of two factors in
    `make test-long`, and all others in `make test-soak`."""
    cells = list(product(*(range(len(values)) for values in factors)))
    paired = covering(cells, pairs_of)
    first = covering(paired, lambda cell: {*enumerate(cell)})
    return [
        pytest.param(
            *(values[place] for values, place in zip(factors, cell, strict=True)),
            marks=() if cell in first else pytest.mark.long if cell in paired else pytest.mark.soak,
        )
        for cell in cells
    ]
