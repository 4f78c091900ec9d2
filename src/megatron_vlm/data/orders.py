"""In which order a rank sees the rows of a map-style dataset, and which of them share a row of a batch.

An order iterates without end over `(place, indices)`: dataset rows that make one row of a batch, and the
place at which the same iteration continues after them. `order.place`, a few integers, is where it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.packing import Rows, attention_cost, balanced_order, pack

Place = tuple[int, ...]
Measured = tuple[
    Place, int, tuple[int, int] | None
]  # place after a row, its index, (tokens, patches) or None


@dataclass
class RandomOrder:
    """One dataset row at a time, each epoch in a new order, each on one rank."""

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows, the same number in every epoch
    rank: int
    world_size: int
    seed: int
    place: Place = (0, 0)  # epoch, position of the rank

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        epoch, position = self.place
        while True:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_of(epoch))
            mine = order[self.rank :: self.world_size]
            for done in range(position + 1, len(mine) + 1):
                yield (epoch, done), [int(mine[done - 1])]
            epoch, position = epoch + 1, 0


@dataclass
class BufferedPacking:
    """Rows packed out of a buffer: `buffer_size` dataset rows in `order` at a time.

    measure      gives for each of an order's rows the place after it, its index, and tokens and patches
    select_rows  (tokens, patches) of a buffer -> the documents of each row; depends on nothing else

    A place is that of the buffer's beginning in `order`, and how many of the buffer's rows are done.
    """

    order: RandomOrder  # or a StreamOrder
    buffer_size: int
    measure: Callable[[RandomOrder], Iterator[Measured]]
    select_rows: Callable[[list[int], list[int]], list[list[int]]]
    place: Place = (0, 0, 0)

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        *begin, done = self.place
        self.order.place = tuple(begin)
        measured = self.measure(self.order)
        while True:
            buffer = list(itertools.islice(measured, self.buffer_size))
            documents = [(index, costs) for _, index, costs in buffer if costs is not None]
            tokens, patches = ([costs[i] for _, costs in documents] for i in (0, 1))
            rows = self.select_rows(tokens, patches)
            for number in range(done, len(rows)):
                following = (*begin, number + 1) if number + 1 < len(rows) else (*buffer[-1][0], 0)
                yield following, [documents[document][0] for document in rows[number]]
            begin, done = buffer[-1][0], 0


@dataclass
class BalancedRows:
    """Rows of documents of known cost, packed anew every epoch or single, in random groups of equal cost.

    A group is what all ranks take at a time: `micro_batch_size` rows each. Ranks stay in step for ever: what
    an epoch leaves over begins a group that the next one completes. Dataset rows known to be dropped
    (tokens < 0) come with the rows of their epoch, for the encoder to count.

    A place is an epoch, how many of its rows are done by all ranks together, and with how many rows of an
    unfinished group the epoch began.
    """

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows
    tokens: ndarray
    patches: ndarray
    rank: int
    world_size: int
    micro_batch_size: int
    seed: int
    capacity: int | None  # tokens in a row; None: single documents, those of about one length in a group
    patch_capacity: int | None = None
    place: Place = (0, 0, 0)

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        epoch, position, begun = self.place
        group = self.micro_batch_size * self.world_size
        while True:
            rows = self._epoch(epoch, -begun % group)
            for done in range(position, len(rows)):
                if (begun + done) % group // self.micro_batch_size == self.rank:
                    yield (epoch, done + 1, begun), rows[done]
            begun, epoch, position = (begun + len(rows)) % group, epoch + 1, 0

    def _epoch(self, epoch: int, unbalanced: int) -> list[list[int]]:
        rng = np.random.default_rng([self.seed, epoch])
        chosen = self.rows_of(epoch)
        fits = self.tokens[chosen] >= 0
        kept, dropped = chosen[fits], chosen[~fits]
        tokens, patches = self.tokens[kept], self.patches[kept]
        group = self.micro_batch_size * self.world_size
        if self.capacity is None:
            rows = Rows(np.arange(len(tokens)), np.arange(len(tokens) + 1))
            order = balanced_order(tokens, np.zeros_like(tokens), group, rng, unbalanced, strips=1)
        else:
            rows = pack(tokens, self.capacity, patches, self.patch_capacity, rng)
            order = balanced_order(attention_cost(rows, tokens), rows.sums(patches), group, rng, unbalanced)
        # the dropped spread over the epoch; where nothing is left to train on, they make a row
        dropped = np.array_split(rng.permutation(dropped), max(1, len(rows)))
        if len(rows) == 0:
            return [indices.tolist() for indices in dropped]
        return [[*kept[rows[row]].tolist(), *more.tolist()] for row, more in zip(order, dropped, strict=True)]


def pieces(order: RandomOrder, size: int) -> Iterator[list[Any]]:
    """The order's entries, `size` at a time."""
    entries = iter(order)
    return iter(lambda: list(itertools.islice(entries, size)), [])
