"""Orders in which several rows of a dataset share a row of a batch, or all ranks have the same work."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.accounts.lost import check_each_once
from megatron_vlm.data.encode.packing import Rows, attention_cost, balanced_order, pack
from megatron_vlm.data.load.orders import Move, Order, Place, RandomOrder

Measured = tuple[Place, int, tuple[int, int] | None]  # place after the row, row, (tokens, patches)


@dataclass
class BufferedPacking(Order):
    """Packs rows from a buffer of `buffer_size` dataset rows at a time, taken in `order`.

    measure      for each row of an order: the place after it, its index, and its tokens and patches
    select_rows  (tokens, patches) of a buffer -> the documents of each row; depends on nothing else

    Dataset rows without a measure come before the rows of their buffer, each alone, for the encoder to count.
    A place is the place in `order` at which the buffer begins, and how many of the buffer's rows are done.
    """

    order: RandomOrder  # or a StreamOrder
    buffer_size: int
    measure: Callable[[RandomOrder], Iterator[Measured]]
    select_rows: Callable[[list[int], list[int]], list[list[int]]]
    place: Place = (0, 0, 0)

    @property
    def moves(self) -> Sequence[Move]:
        return self.order.moves

    @moves.setter
    def moves(self, moves: Sequence[Move]) -> None:
        self.order.moves = moves

    @property
    def other_ranks_go_on(self) -> bool:
        return self.order.other_ranks_go_on

    def close(self) -> None:
        self.measure.close()

    def move(self, places: Sequence[Place]) -> None:
        """See `orders`. Measures the buffers in which the ranks stopped."""
        of_ranks = [self._rest(rank, len(places), place) for rank, place in enumerate(places)]
        self.order.move(*zip(*of_ranks, strict=True))
        self.place = (*self.order.place, 0)

    def _rest(self, rank: int, world_size: int, place: Place) -> tuple[Place, list[Place]]:
        """Where a rank's buffer ended, and the places after its documents that are in rows not yet done."""
        *begin, done = place
        if done == 0:
            return tuple(begin), []
        order = replace(self.order, rank=rank, world_size=world_size, place=tuple(begin))
        buffer = list(itertools.islice(self.measure(order), self.buffer_size))
        return buffer[-1][0], [document[0] for row in self._rows(buffer)[done:] for document in row]

    def _rows(self, buffer: list[Measured]) -> list[list[Measured]]:
        documents = [measured for measured in buffer if measured[2] is not None]
        tokens, patches = ([costs[i] for *_, costs in documents] for i in (0, 1))
        return [[documents[number] for number in row] for row in self.select_rows(tokens, patches)]

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        *begin, done = self.place
        self.order.place = tuple(begin)
        measured = self.measure(self.order)
        while True:
            buffer = list(itertools.islice(measured, self.buffer_size))
            rows, end = self._rows(buffer), buffer[-1][0]
            places = [*((*begin, number) for number in range(len(rows))), (*end, 0)]  # before each, and after
            if done == 0:
                yield from ((places[0], [row]) for _, row, costs in buffer if costs is None)
            for number in range(done, len(rows)):
                yield places[number + 1], [row for _, row, _ in rows[number]]
            begin, done = end, 0


@dataclass
class BalancedRows(Order):
    """Rows of documents of known cost, in random groups of equal cost. Rows are packed again every epoch, or
    hold one document each.

    A group is what all ranks take at a time: `micro_batch_size` rows each. Every group is full on all ranks:
    rows left at an epoch's end start a group that the next epoch fills. Dataset rows known to be dropped
    (tokens < 0) come with the rows of their epoch, for the encoder to count.

    A place is an epoch, how many of its rows all ranks together have done, and how many rows these ranks had
    before the epoch.
    """

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows
    tokens: ndarray
    patches: ndarray
    rank: int
    world_size: int
    micro_batch_size: int
    seed: int
    capacity: int | None  # tokens in a row; None: one document a row, a group has documents of similar length
    patch_capacity: int | None = None
    place: Place = (0, 0, 0)
    moves: Sequence[Move] = ()
    _ends: list[int] = field(default_factory=lambda: [0], init=False)  # what `rows_in` has found

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        epoch, position, begun = self.place
        while True:
            rows = self._rows(epoch, begun)
            for done in range(position, len(rows)):
                if self._rank_of(begun + done) == self.rank:
                    yield (epoch, done + 1, begun), rows[done]
            begun, epoch, position = begun + len(rows), epoch + 1, 0

    def settings(self) -> dict[str, Any]:
        return {"lengths": digest([self.tokens.tolist(), self.patches.tolist()])}

    def rows_in(self, epochs: int) -> int:
        """Packs each of the epochs once."""
        while len(self._ends) <= epochs:
            self._ends.append(self._ends[-1] + len(self._epoch(len(self._ends) - 1, begun=0)))
        return self._ends[epochs]

    def move(self, places: Sequence[Place]) -> None:
        """See `orders`. The rows left of an epoch stay packed as they were, in their order."""
        self.moves = [*self.moves, places]
        self.place = min(places)[0], 0, 0

    def _rank_of(self, row: int) -> int:
        return row // self.micro_batch_size % self.world_size

    def _rows(self, epoch: int, begun: int) -> list[list[int]]:
        if epoch > max((max(places)[0] for places in self.moves), default=-1):
            return self._epoch(epoch, begun)
        # Ranks stopped in this epoch, or later. Deal it to them again, with the `begun` that was theirs, and
        # keep the rows that the rank that got them had not reached.
        places = self.moves[-1]
        before = replace(self, world_size=len(places), moves=self.moves[:-1])
        at, _, begun = min(places)
        while at < epoch:
            begun, at = begun + len(before._rows(at, begun)), at + 1
        rows = enumerate(before._rows(epoch, begun))
        return [row for n, row in rows if [epoch, n] >= list(places[before._rank_of(begun + n)][:2])]

    def _epoch(self, epoch: int, begun: int) -> list[list[int]]:
        rng = np.random.default_rng([self.seed, epoch])
        chosen = self.rows_of(epoch)
        fits = self.tokens[chosen] >= 0
        fitting = chosen[fits]
        dropped = chosen[~fits]
        tokens, patches = self.tokens[fitting], self.patches[fitting]
        group = self.micro_batch_size * self.world_size
        unbalanced = -begun % group
        if self.capacity is None:
            rows = Rows(np.arange(len(tokens)), np.arange(len(tokens) + 1))
            order = balanced_order(tokens, np.zeros_like(tokens), group, rng, unbalanced, strips=1)
        else:
            rows = pack(tokens, self.capacity, patches, self.patch_capacity, rng)
            order = balanced_order(attention_cost(rows, tokens), rows.sums(patches), group, rng, unbalanced)
        check_each_once(rows.documents, len(fitting), "documents to be packed")
        check_each_once(order, len(rows), "packed rows")
        # spread the dropped over the epoch's rows; if no row is left to train on, they make one of their own
        dropped = np.array_split(rng.permutation(dropped), max(1, len(rows)))
        if len(rows) == 0:
            return [indices.tolist() for indices in dropped]
        return [
            [*fitting[rows[row]].tolist(), *more.tolist()] for row, more in zip(order, dropped, strict=True)
        ]
