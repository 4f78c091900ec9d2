"""The documents of a micro batch as gated delta nets take them, on one context-parallel rank.

A state goes from token to token, so a document must be whole where it is computed. Where context parallelism
cuts one, each rank gets all of its tokens, for an equal part of the heads: one exchange before the layer's
convolution and one after its rule. Documents that are whole on a rank send nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.models.layers.delta_net.rule import CHUNK
from megatron_vlm.parallel.context import Piece
from megatron_vlm.parallel.transfer import on_device


@dataclass(frozen=True)
class Documents:
    """Whole documents, one after the other, of `lengths` on the host."""

    lengths: np.ndarray
    device: torch.device

    @cached_property
    def number(self) -> Tensor:
        """(T,) int32: the number of each token's document."""
        numbers = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        return on_device(numbers, self.device)

    @cached_property
    def place(self) -> Tensor:
        """(T,) int32: the place of each token in its document."""
        starts = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return on_device((np.arange(len(starts)) - starts).astype(np.int32), self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """(documents + 1,) int32."""
        return on_device(np.concatenate(([0], self.lengths)).cumsum().astype(np.int32), self.device)

    @cached_property
    def chunks(self) -> Tensor:
        """(chunks, 2) int32: the document of each chunk, if none holds several, and its place in it."""
        counts = -(-self.lengths // CHUNK)
        document = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        return on_device(np.stack((document, place), 1).astype(np.int32), self.device)


@dataclass(frozen=True)
class CutDocuments:
    """Documents that several ranks share, and where their tokens are.

    rows     (n,) this rank's tokens of them
    others   (T - n,) its other tokens
    counts   the number of tokens that each rank has
    joined   (T,) where each of this rank's tokens is among `others`, then `rows`
    order    (M,) where each of their tokens is in what all ranks send, one rank after the other
    back     (M,) the inverse of `order`
    """

    documents: Documents
    rows: Tensor
    others: Tensor
    counts: list[int]
    joined: Tensor
    order: Tensor
    back: Tensor


@dataclass(frozen=True)
class Recurrence:
    """The tokens of a rank. `whole` are its documents that are not cut, and its padding as one more."""

    whole: Documents
    cut: CutDocuments | None


def recurrence(pieces: list[list[Piece]], rank: int, length: int, device: torch.device) -> Recurrence:
    """The recurrence of a rank. `pieces` are what each rank holds; `length` counts padding, too."""
    ranks_of: dict[int, set[int]] = {}
    for holder, rank_pieces in enumerate(pieces):
        for document, _, _ in rank_pieces:
            ranks_of.setdefault(document, set()).add(holder)
    shared = {document for document, ranks in ranks_of.items() if len(ranks) > 1}
    padding = length - sum(stop - start for _, start, stop in pieces[rank])
    lengths = [stop - start for document, start, stop in pieces[rank] if document not in shared]
    whole_documents = Documents(np.array([*lengths, *[padding] * bool(padding)], np.int64), device)
    if not shared:
        return Recurrence(whole_documents, None)
    is_cut = [
        # a rank may hold nothing: of no list numpy would make numbers
        np.repeat(
            np.array([d in shared for d, _, _ in rank_pieces], bool), [b - a for _, a, b in rank_pieces]
        )
        for rank_pieces in pieces
    ]
    # (document, place) of each token in what all ranks send
    sent = [
        np.stack((np.full(stop - start, document), np.arange(start, stop)))
        for rank_pieces in pieces
        for document, start, stop in rank_pieces
        if document in shared
    ]
    documents, places = np.concatenate(sent, axis=1)
    order = np.lexsort((places, documents))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    is_here = np.pad(is_cut[rank], (0, padding))
    rows = np.flatnonzero(is_here)
    uncut = np.flatnonzero(~is_here)
    cut = CutDocuments(
        documents=Documents(np.unique(documents, return_counts=True)[1], device),
        rows=on_device(rows, device),
        others=on_device(uncut, device),
        counts=[int(each.sum()) for each in is_cut],
        joined=on_device(np.argsort(np.concatenate((uncut, rows))), device),
        order=on_device(order, device),
        back=on_device(back, device),
    )
    return Recurrence(whole_documents, cut)
