"""The order in which a rank sees the rows of a dataset or a stream; `packed_orders` has orders of packing.

The epochs follow one another without a gap and are dealt to the ranks as one sequence, so after a global
batch the ranks together have had the first so many rows of it, whatever their number.

An order iterates without end over `(place, indices)`: the dataset rows that make one row of a batch, and the
place at which the same iteration continues after them. `order.place`, a few integers, is where it begins.

Any number of ranks can go on where others stopped: `order.move(places)` takes the places of those that did.
What they had left of their epochs is dealt again; then epochs follow as usual. `order.moves` remembers this.
Of a stream, each rank reads its part in a fixed order, and no other number of ranks can go on.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.records.streams import Row, StreamedRows

Place = tuple[int, ...]
Move = Sequence[Any]  # for each rank that stopped: its place, and whatever else tells what it had left


class Order:
    """The base of all orders; they iterate over (place after a batch row, the dataset rows that make it)."""

    other_ranks_go_on = True  # whether another number of ranks can continue a state

    def rows_in(self, epochs: int) -> int | None:
        """How many batch rows the first epochs have over all ranks; None: only reading tells."""
        return None

    def settings(self) -> dict[str, Any]:
        """The settings that belong to a loader's fingerprint."""
        return {}

    def close(self) -> None:
        """End the workers that the order reads with."""


@dataclass
class RandomOrder(Order):
    """One dataset row at a time, in a new order each epoch; a row of an epoch is on one rank. The ranks take
    turns, also from one epoch to the next."""

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows, the same number in every epoch
    rank: int
    world_size: int
    seed: int
    place: Place = (0, 0)  # epoch, position of the rank
    moves: Sequence[Move] = ()

    def rows_in(self, epochs: int) -> int:
        return epochs * self._rows

    @cached_property
    def _rows(self) -> int:
        """The number of rows of each epoch."""
        return len(self.rows_of(0))

    def __iter__(self) -> Iterator[tuple[Place, list[int]]]:
        epoch, position = self.place
        begun = self._begun(epoch)
        while True:
            rows = self._epoch(epoch)
            mine = rows[(self.rank - begun) % self.world_size :: self.world_size]
            for done in range(position + 1, len(mine) + 1):
                yield (epoch, done), [int(mine[done - 1])]
            begun, epoch, position = begun + len(rows), epoch + 1, 0

    def move(self, places: Sequence[Place], left: Sequence[Sequence[Place]] = ()) -> None:
        """See the module. `left`: for each rank, the places after rows that it passed over without use."""
        ranks = [[place, *more] for place, more in itertools.zip_longest(places, left, fillvalue=())]
        self.moves = [*self.moves, ranks]
        self.place = min(epoch for rank in ranks for epoch, _ in rank), 0

    def _epoch(self, epoch: int) -> ndarray:
        """The rows of an epoch that these ranks share, in the order in which they take turns."""
        if not self.moves:
            return np.random.default_rng([self.seed, epoch]).permutation(self.rows_of(epoch))
        # What the ranks of the last move had not used: of a rank's share all after `done` in the epoch that
        # it had reached, nothing of earlier epochs, all of later ones, and in any epoch the rows in `left`.
        ranks = self.moves[-1]
        before = replace(self, world_size=len(ranks), moves=self.moves[:-1])
        order, begun = before._epoch(epoch), before._begun(epoch)
        still = np.zeros(len(order), bool)
        for rank, ((reached, done), *left) in enumerate(ranks):
            mine = still[(rank - begun) % len(ranks) :: len(ranks)]
            mine[done if epoch == reached else 0 if epoch > reached else len(mine) :] = True
            mine[[number - 1 for at, number in left if at == epoch]] = True
        return order[still]

    def _begun(self, epoch: int) -> int:
        """How many rows these ranks shared in the epochs before."""
        reached = [at for ranks in self.moves for rank in ranks for at, _ in rank]
        cut = max(reached, default=-1) + 1  # the first epoch that no move has touched
        start = min((at for rank in self.moves[-1] for at, _ in rank)) if self.moves else 0
        touched = sum(len(self._epoch(number)) for number in range(start, min(epoch, cut)))
        return touched + max(0, epoch - max(start, cut)) * self._rows


@dataclass
class StreamOrder(Order):
    """Iterates without end over `(place, [row])`; each row of an epoch is on one rank.

    Shards come in a new order each epoch. If the number of shards is a multiple of the number of ranks, each
    rank reads its own shards; else every rank reads all shards and keeps its share of the rows of each. A
    block of `buffer_size` rows is shuffled at a time; a block ends with its epoch. Workers do not read, they
    only encode.

    A place is where its block began (epoch, shards that the rank has done, rows done of the next shard) and
    how many of the block's rows are done, so resuming reads the shard again up to there. Raises ValueError if
    a shard ends before a place in it: the source changed.
    """

    table: StreamedRows
    rank: int
    world_size: int
    seed: int
    buffer_size: int
    place: Place = (0, 0, 0, 0)
    moves: Sequence = ()

    other_ranks_go_on = False  # which rows a rank reads depends on the number of ranks

    def __iter__(self) -> Iterator[tuple[Place, list[Row]]]:
        *begin, done = self.place
        while True:
            rows = self._epoch(begin[0], begin[1], begin[2])
            epoch_is_empty = begin[1:] == [0, 0]
            while block := list(itertools.islice(rows, max(1, self.buffer_size))):
                epoch_is_empty = False
                order = np.random.default_rng([self.seed, self.rank, *begin]).permutation(len(block))
                after = [*block[-1][0]]
                for number in range(done, len(block)):
                    following = (*begin, number + 1) if number + 1 < len(block) else (*after, 0)
                    yield following, [block[order[number]][1]]
                begin, done = after, 0
            if epoch_is_empty:
                raise ValueError(
                    f"data: rank {self.rank} of {self.world_size} has no row of the stream; use fewer ranks."
                )
            begin = [begin[0] + 1, 0, 0]

    def _epoch(self, epoch: int, shards_done: int, rows_done: int) -> Iterator[tuple[Place, Row]]:
        """The rest of an epoch, and the place after each row."""
        count = self.table.stream.num_shards
        shards = np.random.default_rng([self.seed, epoch]).permutation(count).tolist()
        share = count % self.world_size == 0
        mine = shards[self.rank :: self.world_size] if share else shards
        for done, shard in enumerate(mine[shards_done:], start=shards_done):
            read = 0
            for read, record in enumerate(self.table.records(shard), start=1):
                if read <= rows_done or not (share or (read + shard) % self.world_size == self.rank):
                    continue
                yield (epoch, done, read), ((shard, read - 1, epoch), record)
            if read < rows_done:
                raise ValueError(
                    f"data: shard {shard} of the stream has {read} rows, the state continues after "
                    f"{rows_done}; the source changed, so it cannot be resumed."
                )
            rows_done = 0
