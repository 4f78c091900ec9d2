"""The order of a stream: each rank reads its part in a fixed order, so a state is a few numbers.

One process per rank reads, in blocks that are shuffled whole; workers encode. A state remembers where a block
began, so resuming reads the shard again up to there.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.data.load.orders import Order, Place
from megatron_vlm.data.records.streams import Row


@dataclass
class StreamOrder(Order):
    """Iterates without end over `(place, [row])`; each row of an epoch is on one rank.

    Shards come in a new order each epoch. If the number of shards is a multiple of the number of ranks, each
    rank reads its own shards; else every rank reads all shards and keeps its share of the rows of each. A
    block of `buffer_size` rows is shuffled at a time; a block ends with its epoch.

    A place is where its block began (epoch, shards that the rank has done, rows done of the next shard) and
    how many of the block's rows are done. Raises ValueError if a shard ends before a place in it: the source
    changed.
    """

    stream: Any
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
        count = self.stream.num_shards
        shards = np.random.default_rng([self.seed, epoch]).permutation(count).tolist()
        share = count % self.world_size == 0
        mine = shards[self.rank :: self.world_size] if share else shards
        for done, shard in enumerate(mine[shards_done:], start=shards_done):
            read = 0
            for read, record in enumerate(self.stream.shard(count, shard), start=1):
                if read <= rows_done or not (share or (read + shard) % self.world_size == self.rank):
                    continue
                yield (epoch, done, read), ((shard, read - 1), record)
            if read < rows_done:
                raise ValueError(
                    f"data: shard {shard} of the stream has {read} rows, the state continues after "
                    f"{rows_done}; the source changed, so it cannot be resumed."
                )
            rows_done = 0
