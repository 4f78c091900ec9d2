"""Samplers: which rows of a dataset or a stream a rank sees, and in which order.

    epoch e of N rows, shuffled by (seed, e):   7 2 5 0 | 3 6 1 4   …without a gap into epoch e + 1
    ranks take turns:             rank 0 of 2:  7   5   |   6   4
                                  rank 1 of 2:    2   0 | 3   1

After a global batch the ranks together have had the first so many rows of that one sequence, whatever their
number. A sampler iterates without end over `(position, rows)`: the rows that make one row of a batch, and the
position at which the same iteration goes on after them. `sampler.position`, a few integers, is where it
begins.

    ShuffledSampler    one row at a time
    StreamSampler      one row at a time, from shards that are read in turn, shuffled in a buffer
    PackingSampler     rows of another sampler, packed from a buffer
    BalancedSampler    the whole epoch packed, or sorted by length, so that all ranks have the same work

Any number of ranks can go on where others stopped: `sampler.reshard(positions)` takes the positions of those
ranks. What they had left of their epochs is dealt again; then epochs follow as usual. `sampler.reshards`
remembers this. Of a stream, each rank reads its part in a fixed order: no other number of ranks can go on.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.drops import check_each_once
from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.encode.packing import PackedRows, attention_cost, balanced_order, pack
from megatron_vlm.data.records.streams import Row, StreamedRows

Position = tuple[int, ...]
Reshard = Sequence[Any]  # for each rank that stopped: its position, and whatever else tells what it had left
Measured = tuple[Position, int, tuple[int, int] | None]  # position after the row, row, (tokens, patches)


class Sampler:
    """The base class; iterates over (position after a row of a batch, the dataset rows that make it)."""

    supports_resharding = True  # whether another number of ranks can continue a state

    def rows_in(self, epochs: int) -> int | None:
        """How many batch rows the first epochs have over all ranks; None: only reading tells."""
        return None

    def settings(self) -> dict[str, Any]:
        """The settings that belong to a loader's fingerprint."""
        return {}

    def close(self) -> None:
        """End the workers that the sampler reads with."""


@dataclass
class ShuffledSampler(Sampler):
    """One dataset row at a time, in a new order each epoch; a row of an epoch is on one rank. The ranks take
    turns, also from one epoch to the next."""

    rows_of: Callable[[int], ndarray]  # epoch -> its dataset rows, the same number in every epoch
    rank: int
    world_size: int
    seed: int
    position: Position = (0, 0)  # epoch, rows of it that the rank has done
    reshards: Sequence[Reshard] = ()
    # {(number of reshards, epoch): rows of the epoch that are dealt after them}, so that each is counted once
    _sizes: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def rows_in(self, epochs: int) -> int:
        return epochs * self._rows

    @cached_property
    def _rows(self) -> int:
        """The number of rows of each epoch."""
        return len(self.rows_of(0))

    def __iter__(self) -> Iterator[tuple[Position, list[int]]]:
        epoch, rows_done = self.position
        rows_before = self._rows_before(epoch)
        while True:
            rows = self._epoch(epoch)
            of_rank = rows[(self.rank - rows_before) % self.world_size :: self.world_size]
            for done in range(rows_done + 1, len(of_rank) + 1):
                yield (epoch, done), [int(of_rank[done - 1])]
            rows_before, epoch, rows_done = rows_before + len(rows), epoch + 1, 0

    def reshard(self, positions: Sequence[Position], unused: Sequence[Sequence[Position]] = ()) -> None:
        """See the module. `unused`: for each rank, the positions after rows that it passed over."""
        ranks = [
            [position, *more] for position, more in itertools.zip_longest(positions, unused, fillvalue=())
        ]
        self.reshards = [*self.reshards, ranks]
        self.position = min(epoch for rank in ranks for epoch, _ in rank), 0

    def _epoch(self, epoch: int) -> ndarray:
        """The rows of an epoch that these ranks share, in the order in which they take turns."""
        if not self.reshards:
            return np.random.default_rng([self.seed, epoch]).permutation(self.rows_of(epoch))
        # Deal what the ranks before had not used: of a rank's share all after `done` in the epoch that it had
        # reached, nothing of earlier epochs, all of later ones, and in any epoch the rows in `unused`.
        ranks = self.reshards[-1]
        before = replace(self, world_size=len(ranks), reshards=self.reshards[:-1])
        order, rows_before = before._epoch(epoch), before._rows_before(epoch)
        still = np.zeros(len(order), bool)
        for rank, ((reached, done), *unused) in enumerate(ranks):
            of_rank = still[(rank - rows_before) % len(ranks) :: len(ranks)]
            of_rank[done if epoch == reached else 0 if epoch > reached else len(of_rank) :] = True
            of_rank[[number - 1 for at, number in unused if at == epoch]] = True
        return order[still]

    def _size(self, epoch: int) -> int:
        key = len(self.reshards), epoch
        if key not in self._sizes:
            self._sizes[key] = len(self._epoch(epoch))
        return self._sizes[key]

    def _rows_before(self, epoch: int) -> int:
        """How many rows these ranks shared in the epochs before."""
        reached = [at for ranks in self.reshards for rank in ranks for at, _ in rank]
        cut = max(reached, default=-1) + 1  # the first epoch that no reshard has touched
        start = min((at for rank in self.reshards[-1] for at, _ in rank)) if self.reshards else 0
        touched = sum(self._size(number) for number in range(start, min(epoch, cut)))
        return touched + max(0, epoch - max(start, cut)) * self._rows


@dataclass
class StreamSampler(Sampler):
    """Iterates without end over `(position, [row])`; each row of an epoch is on one rank.

    Shards come in a new order each epoch. If the number of shards is a multiple of the number of ranks, each
    rank reads its own shards; else every rank reads all shards and keeps its share of the rows of each. A
    block of `buffer_size` rows is shuffled at a time; a block ends with its epoch. Workers do not read, they
    only encode.

    A position is where its block began (epoch, shards that the rank has done, rows done of the next one) and
    how many of the block's rows are done, so resuming reads the shard again up to there. Raises ValueError if
    a shard ends before a position in it: the source changed.
    """

    table: StreamedRows
    rank: int
    world_size: int
    seed: int
    buffer_size: int
    position: Position = (0, 0, 0, 0)
    reshards: Sequence = ()

    supports_resharding = False  # which rows a rank reads depends on the number of ranks

    def __iter__(self) -> Iterator[tuple[Position, list[Row]]]:
        *begin, done = self.position
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

    def _epoch(self, epoch: int, shards_done: int, rows_done: int) -> Iterator[tuple[Position, Row]]:
        """The rest of an epoch, and the position after each row."""
        count = self.table.stream.num_shards
        shards = np.random.default_rng([self.seed, epoch]).permutation(count).tolist()
        share = count % self.world_size == 0
        of_rank = shards[self.rank :: self.world_size] if share else shards
        for done, shard in enumerate(of_rank[shards_done:], start=shards_done):
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


@dataclass
class PackingSampler(Sampler):
    """Packs rows from a buffer of `buffer_size` dataset rows at a time, taken from `sampler`.

    measure      for each row of a sampler: the position after it, its index, and its tokens and patches
    select_rows  (tokens, patches) of a buffer -> the documents of each row; depends on nothing else

    Dataset rows without a measure come before the rows of their buffer, each alone, for the encoder to count.
    A position is the one of `sampler` where the buffer begins, and how many of the buffer's rows are done.
    """

    sampler: ShuffledSampler | StreamSampler
    buffer_size: int
    measure: Callable[[ShuffledSampler], Iterator[Measured]]
    select_rows: Callable[[list[int], list[int]], list[list[int]]]
    position: Position = (0, 0, 0)

    @property
    def reshards(self) -> Sequence[Reshard]:
        return self.sampler.reshards

    @reshards.setter
    def reshards(self, reshards: Sequence[Reshard]) -> None:
        self.sampler.reshards = reshards

    @property
    def supports_resharding(self) -> bool:
        return self.sampler.supports_resharding

    def close(self) -> None:
        self.measure.close()

    def reshard(self, positions: Sequence[Position]) -> None:
        """See the module. Measures the buffers in which the ranks stopped."""
        of_ranks = [self._rest(rank, len(positions), position) for rank, position in enumerate(positions)]
        self.sampler.reshard(*zip(*of_ranks, strict=True))
        self.position = (*self.sampler.position, 0)

    def _rest(self, rank: int, world_size: int, position: Position) -> tuple[Position, list[Position]]:
        """The end of a rank's buffer, and the positions after its documents in rows that are not yet done."""
        *begin, done = position
        if done == 0:
            return tuple(begin), []
        order = replace(self.sampler, rank=rank, world_size=world_size, position=tuple(begin))
        buffer = list(itertools.islice(self.measure(order), self.buffer_size))
        return buffer[-1][0], [document[0] for row in self._rows(buffer)[done:] for document in row]

    def _rows(self, buffer: list[Measured]) -> list[list[Measured]]:
        documents = [measured for measured in buffer if measured[2] is not None]
        tokens, patches = ([costs[i] for *_, costs in documents] for i in (0, 1))
        return [[documents[number] for number in row] for row in self.select_rows(tokens, patches)]

    def __iter__(self) -> Iterator[tuple[Position, list[int]]]:
        *begin, done = self.position
        self.sampler.position = tuple(begin)
        measured = self.measure(self.sampler)
        while True:
            buffer = list(itertools.islice(measured, self.buffer_size))
            rows, end = self._rows(buffer), buffer[-1][0]
            # before each row, and after the last
            positions = [*((*begin, number) for number in range(len(rows))), (*end, 0)]
            if done == 0:
                yield from ((positions[0], [row]) for _, row, costs in buffer if costs is None)
            for number in range(done, len(rows)):
                yield positions[number + 1], [row for _, row, _ in rows[number]]
            begin, done = end, 0


@dataclass
class BalancedSampler(Sampler):
    """Rows of documents of known cost, in random groups of equal cost. Rows are packed again every epoch, or
    hold one document each.

    A group is what all ranks take at a time: `micro_batch_size` rows each. Every group is full on all ranks:
    rows left at an epoch's end start a group that the next epoch fills. Dataset rows known to be dropped
    (tokens < 0) come with the rows of their epoch, for the encoder to count.

    A position is an epoch, how many of its rows all ranks together have done, and how many rows these ranks
    had before the epoch.
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
    position: Position = (0, 0, 0)
    reshards: Sequence[Reshard] = ()
    _ends: list[int] = field(default_factory=lambda: [0], init=False)  # what `rows_in` has found

    def __iter__(self) -> Iterator[tuple[Position, list[int]]]:
        epoch, rows_done, rows_before = self.position
        while True:
            rows = self._rows(epoch, rows_before)
            for done in range(rows_done, len(rows)):
                if self._rank_of(rows_before + done) == self.rank:
                    yield (epoch, done + 1, rows_before), rows[done]
            rows_before, epoch, rows_done = rows_before + len(rows), epoch + 1, 0

    def settings(self) -> dict[str, Any]:
        return {"lengths": digest([self.tokens.tolist(), self.patches.tolist()])}

    def rows_in(self, epochs: int) -> int:
        """Packs each of the epochs once."""
        while len(self._ends) <= epochs:
            self._ends.append(self._ends[-1] + len(self._epoch(len(self._ends) - 1, rows_before=0)))
        return self._ends[epochs]

    def reshard(self, positions: Sequence[Position]) -> None:
        """See the module. The rows left of an epoch stay packed as they were, in their order."""
        self.reshards = [*self.reshards, positions]
        self.position = min(positions)[0], 0, 0

    def _rank_of(self, row: int) -> int:
        return row // self.micro_batch_size % self.world_size

    def _rows(self, epoch: int, rows_before: int) -> list[list[int]]:
        if epoch > max((max(positions)[0] for positions in self.reshards), default=-1):
            return self._epoch(epoch, rows_before)
        # Ranks stopped in this epoch, or later. Deal it to them again, with the `rows_before` that they had,
        # and keep the rows that the rank that got them had not reached.
        positions = self.reshards[-1]
        before = replace(self, world_size=len(positions), reshards=self.reshards[:-1])
        at, _, rows_before = min(positions)
        while at < epoch:
            rows_before, at = rows_before + len(before._rows(at, rows_before)), at + 1
        rows = enumerate(before._rows(epoch, rows_before))
        return [row for n, row in rows if [epoch, n] >= list(positions[before._rank_of(rows_before + n)][:2])]

    def _epoch(self, epoch: int, rows_before: int) -> list[list[int]]:
        rng = np.random.default_rng([self.seed, epoch])
        chosen = self.rows_of(epoch)
        fits = self.tokens[chosen] >= 0
        fitting = chosen[fits]
        dropped = chosen[~fits]
        tokens, patches = self.tokens[fitting], self.patches[fitting]
        group = self.micro_batch_size * self.world_size
        unbalanced = -rows_before % group
        if self.capacity is None:
            rows = PackedRows(np.arange(len(tokens)), np.arange(len(tokens) + 1))
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
