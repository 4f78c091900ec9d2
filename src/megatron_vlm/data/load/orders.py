"""In which order a rank sees the rows of a map-style dataset; in `packed_orders`, several of them in a row.

An order iterates without end over `(place, indices)`: dataset rows that make one row of a batch, and the
place at which the same iteration continues after them. `order.place`, a few integers, is where it begins.

Any number of ranks can go on where others stopped: `order.move(places)` is given the places of all of them.
What they had left of their epochs is dealt again, then epochs follow as before. `order.moves` remembers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy import ndarray

Place = tuple[int, ...]
Move = Sequence[Any]  # of each rank that stopped, its place, and what else tells what it had left


class Order:
    """What all orders of rows have; they iterate over (place after a row, the rows that make it)."""

    other_ranks_go_on = True  # whether another number of ranks can continue a state

    def settings(self) -> dict[str, Any]:
        """What of them belongs to a loader's fingerprint."""
        return {}

    def close(self) -> None:
        """End what the order reads by."""


@dataclass
class RandomOrder(Order):
    """One dataset row at a time, each epoch in a new order, each on one rank."""

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows, the same number in every epoch
    rank: int
    world_size: int
    seed: int
    place: Place = (0, 0)  # epoch, position of the rank
    moves: Sequence[Move] = ()

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        epoch, position = self.place
        while True:
            mine = self._epoch(epoch)[self.rank :: self.world_size]
            for done in range(position + 1, len(mine) + 1):
                yield (epoch, done), [int(mine[done - 1])]
            epoch, position = epoch + 1, 0

    def move(self, places: Sequence[Place], left: Sequence[Sequence[Place]] = ()) -> None:
        """`left`: by rank, the places after those of its rows that it had passed over."""
        ranks = [[place, *more] for place, more in zip_longest(places, left, fillvalue=())]
        self.moves = [*self.moves, ranks]
        self.place = min(epoch for rank in ranks for epoch, _ in rank), 0

    def _epoch(self, epoch: int) -> ndarray:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_of(epoch))
        for ranks in self.moves:
            still = np.zeros(len(order), bool)
            for rank, ((reached, done), *left) in enumerate(ranks):
                mine = still[rank :: len(ranks)]
                mine[done if epoch == reached else 0 if epoch > reached else len(mine) :] = True
                mine[[number - 1 for at, number in left if at == epoch]] = True
            order = order[still]
        return order


def pieces(order: RandomOrder, size: int) -> Iterator[list[Any]]:
    """The order's entries, `size` at a time."""
    entries = iter(order)
    return iter(lambda: list(itertools.islice(entries, size)), [])
