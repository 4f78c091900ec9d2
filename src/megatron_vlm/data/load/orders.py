"""The order in which a rank sees the rows of a map-style dataset; `packed_orders` has orders of packed rows.

An order iterates without end over `(place, indices)`: the dataset rows that make one row of a batch, and the
place at which the same iteration continues after them. `order.place`, a few integers, is where it begins.

Any number of ranks can go on where others stopped: `order.move(places)` takes the places of those that did.
What they had left of their epochs is dealt again; then epochs follow as usual. `order.moves` remembers this.
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
Move = Sequence[Any]  # for each rank that stopped: its place, and whatever else tells what it had left


class Order:
    """What all orders have; they iterate over (place after a batch row, the dataset rows that make it)."""

    other_ranks_go_on = True  # whether another number of ranks can continue a state

    def settings(self) -> dict[str, Any]:
        """The settings that belong to a loader's fingerprint."""
        return {}

    def close(self) -> None:
        """End the workers that the order reads with."""


@dataclass
class RandomOrder(Order):
    """One dataset row at a time, in a new order each epoch; a row of an epoch is on one rank."""

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
        """See the module. `left`: for each rank, the places after rows that it passed over without use."""
        ranks = [[place, *more] for place, more in zip_longest(places, left, fillvalue=())]
        self.moves = [*self.moves, ranks]
        self.place = min(epoch for rank in ranks for epoch, _ in rank), 0

    def _epoch(self, epoch: int) -> ndarray:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_of(epoch))
        # Each move keeps what its ranks had not used: of a rank's share all after `done` in the epoch that it
        # had reached, nothing of earlier epochs, all of later ones, and in any epoch the rows in `left`.
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
