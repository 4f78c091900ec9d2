"""Which tokens of a micro batch see which, as index lists made on the host, for one context-parallel rank.

A query may see a key exactly if both lie in the same document and
  - the key is not later, or both lie in the same bidirectional block (an image's tokens, for Gemma3; for
    Gemma4 only in layers with a sliding window), and
  - in a layer with a sliding window, the key is less than `window` positions back; for Gemma4's 12B, also
    any that lies in the same block.

The plan goes from block to layer as Megatron's `packed_seq_params`, which activation recomputation hands on
unchanged, so no layer makes anything again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.models.layers.attention_kernels import Segments
from megatron_vlm.models.layers.attention_sizes import RECURRENT
from megatron_vlm.models.layers.cross_layer import CrossLayerTensors
from megatron_vlm.models.layers.delta_rule import recurrence
from megatron_vlm.parallel.context import Piece, place
from megatron_vlm.parallel.setup import on_device

PADDING_AT_ONCE = 128  # tokens of a segment of padding: no work to speak of, however much there is


class Placement:
    """A micro batch's documents on the context-parallel ranks, the same on each.

    A token's place is its index in the documents one after the other. `tokens[rank]` are the places of the
    tokens that a rank holds, in its order; `owner` is the rank of every place, `row` where it lies there.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        blocks: Sequence[tuple[int, int, int]],
        ranks: int,
        bidirectional: bool | str = True,
    ):
        self.ends = np.cumsum(lengths, dtype=np.int64)
        self.starts = self.ends - np.asarray(lengths, dtype=np.int64)
        self.blocks = blocks
        self.bidirectional = bidirectional  # `Description.bidirectional_images`
        self.pieces = place(lengths, ranks, blocks)
        self.tokens = [self.places(pieces) for pieces in self.pieces]
        tokens = sum(lengths)
        self.owner = np.empty(tokens, np.int16)  # sorted in linear time
        self.row = np.empty(tokens, np.int64)
        for rank, places in enumerate(self.tokens):
            self.owner[places] = rank
            self.row[places] = np.arange(len(places))

    def has_blocks(self, window: int | None) -> bool:
        """Whether blocks are bidirectional in layers with this window."""
        return window is not None or self.bidirectional != "windows"

    def behind(self, length: int, window: int | None) -> int:
        """How many of a block's tokens see tokens of it that are further back than this window."""
        return max(0, length - (window or length)) if self.bidirectional == "whole" else 0

    def places(self, pieces: Sequence[Piece]) -> np.ndarray:
        runs = [np.arange(start, stop) + self.starts[document] for document, start, stop in pieces]
        return np.concatenate([np.empty(0, np.int64), *runs])


@dataclass(frozen=True)
class Exchange:
    """Rows of keys that go to each rank of context parallelism, and how many come from each."""

    rows: Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class View:
    """The view of a layer's queries. Its keys are this rank's tokens, then those from `exchange`, then all of
    them in `order`; None leaves them as they are.

    `more` are rows of queries, rows of keys and segments of what `segments` leaves out. In a block of n
    tokens, the first n - 1 see what follows them among the last n - 1. Where it is longer than the window and
    is seen whole, its last n - window see what is further back among the first n - window.
    """

    segments: Segments
    window: int | None
    received: np.ndarray  # the places of what `exchange` brings
    exchange: Exchange | None = None
    order: Tensor | None = None
    more: tuple[tuple[Tensor, Tensor, Segments], ...] = ()


class AttentionPlan:
    """The views of all kinds of layers, by window. `length` is the rank's number of tokens with padding.

    `attend`, if set, takes the place of `CoreAttention.attend`, and `recur` of `GatedDeltaNet.recur`:
    generation keeps keys, values and states by them.
    `turns` are the rotary tables of the tokens, see `Rotary.turns`, `query_scale` is from
    `Rotary.query_scales`, and `asides` is what layers take from earlier ones, by the number of these; the
    language model makes all three.
    """

    attend: Callable[..., Tensor] | None = None
    recur: Callable[..., Tensor] | None = None
    turns: list[list[list[Tensor]]]
    query_scale: Tensor | None
    asides: dict[int, CrossLayerTensors]

    def __init__(
        self,
        placement: Placement,
        rank: int,
        length: int,
        windows: Iterable[int | None],
        device: torch.device,
    ):
        self.placement, self.rank, self.length, self.device = placement, rank, length, device
        self.places = placement.tokens[rank]
        self.local = np.where(placement.owner == rank, placement.row, -1)  # rows of places; -1: elsewhere
        self.views = {
            window: recurrence(placement.pieces, rank, length, device)
            if window == RECURRENT
            else self._view(window)
            for window in set(windows)
        }
        # of the dense backend by window and dtype, made once for all layers
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def _view(self, window: int | None) -> View:
        pieces, seen = self.placement.pieces[self.rank], self._seen(self.rank, window)
        padding = np.arange(len(self.places), self.length)
        more = [len(run) for run in np.split(padding, range(PADDING_AT_ONCE, len(padding), PADDING_AT_ONCE))]
        queries, keys = (
            [stop - start for _, start, stop in runs] + more * bool(len(padding)) for runs in (pieces, seen)
        )
        window_left = None if window is None else window - 1
        segments = Segments(np.array(queries), np.array(keys), window_left, 0, self.device)
        if sum(map(len, self.placement.pieces)) == len(self.placement.starts):  # no document is cut
            return View(segments, window, np.empty(0, np.int64), more=self._more(window, None))
        received, exchange = self._exchange(window)
        slots = self.local.copy()
        slots[received] = self.length + np.arange(len(received))
        order = np.concatenate((slots[self.placement.places(seen)], padding))
        order_here = on_device(order, self.device)
        return View(segments, window, received, exchange, order_here, self._more(window, order))

    def _seen(self, rank: int, window: int | None) -> list[Piece]:
        """For each piece of a rank, the run of keys that its queries see."""
        return [
            (document, 0 if window is None else max(0, start - window + 1), stop)
            for document, start, stop in self.placement.pieces[rank]
        ]

    def _exchange(self, window: int | None) -> tuple[np.ndarray, Exchange | None]:
        """The places whose keys come from other ranks, by rank and place, and what travels.

        If nothing travels between any ranks, there is no exchange.
        """
        owner = self.placement.owner
        foreign = []
        for rank in range(len(self.placement.pieces)):
            needed = np.zeros(len(owner), bool)
            for document, start, stop in self._seen(rank, window):
                first = self.placement.starts[document]
                needed[first + start : first + stop] = True
            places = np.flatnonzero(needed & (owner != rank))
            foreign.append(places[np.argsort(owner[places], kind="stable")])
        of_rank = foreign[self.rank]
        if not any(map(len, foreign)):
            return of_rank, None
        sent = [self.local[places[owner[places] == self.rank]] for places in foreign]
        received = np.bincount(owner[of_rank], minlength=len(foreign)).tolist()
        return of_rank, Exchange(on_device(np.concatenate(sent), self.device), list(map(len, sent)), received)

    def _more(
        self, window: int | None, order: np.ndarray | None
    ) -> tuple[tuple[Tensor, Tensor, Segments], ...]:
        """See `View.more`. No block is cut, so its keys are this rank's own."""
        if not self.placement.has_blocks(window):
            return ()
        blocks = [
            (self.local[self.placement.starts[document] + start], stop - start)
            for document, start, stop in self.placement.blocks
        ]
        blocks = [(row, length) for row, length in blocks if row >= 0]
        later = [(row, row + 1, length - 1) for row, length in blocks]
        behind = [(row, self.placement.behind(length, window)) for row, length in blocks]
        behind = [(row + (window or 0), row, length) for row, length in behind]
        both = (self._runs(later, order, 0, None), self._runs(behind, order, None, 0))
        return tuple(part for part in both if part is not None)

    def _runs(
        self, runs: list[tuple[int, int, int]], order: np.ndarray | None, left: int | None, right: int | None
    ) -> tuple[Tensor, Tensor, Segments] | None:
        """Rows of queries and of keys, and a segment for each of `runs` (first query, first key, length)."""
        runs = [run for run in runs if run[2]]
        if not runs:
            return None
        queries, keys = (
            np.concatenate([np.arange(run[side], run[side] + run[2]) for run in runs]) for side in (0, 1)
        )
        if order is not None:
            row_of = np.empty(order.max() + 1, np.int64)
            row_of[order] = np.arange(len(order))
            keys = row_of[keys]
        lengths = np.array([length for *_, length in runs])
        segments = Segments(lengths, lengths, left, right, self.device)
        return on_device(queries, self.device), on_device(keys, self.device), segments
