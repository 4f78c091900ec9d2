"""Visual features, computed by the ranks that share a micro batch and brought to where their tokens are.

The towers of tensor- and context-parallel ranks are replicas. With a share of the images each, one collective
sends every feature to the ranks that hold its token; else every rank computes all and takes its own.
"""

from collections.abc import Callable

import numpy as np
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.parallel.transfer import on_device


def spread_over_ranks(
    vision: Callable[[list[GenericVisualInputs]], Tensor],
    visual: GenericVisualInputs,
    visual_tokens: list[int],
    blank: GenericVisualInputs,
    wanted: list[np.ndarray],
    group: dist.ProcessGroup,
) -> Tensor:
    """The features that this rank wants, each computed on one rank of the group: (m, D), or (1 + n, m, D).

    `visual_tokens` is how many features each item has; `wanted` lists for every rank of the group the
    features, counted in document order, that it wants. A rank without items computes `blank` instead, so that
    all ranks do the same collectives.
    """
    items, size, rank = visual.items(), group.size(), group.rank()
    shares = balanced_shares(visual_tokens, size)
    own = [items[i] for i in shares[rank]]
    features = vision(own or [blank]).movedim(-2, 0)
    if not own:
        features = features[:0]
    # each rank sends every other the features that it wants
    maker, row = _makers(shares, visual_tokens)
    sent = [row[ids[maker[ids] == rank]] for ids in wanted]
    received = np.bincount(maker[wanted[rank]], minlength=size).tolist()
    flat = features.flatten(1).index_select(0, on_device(np.concatenate(sent), features.device))
    by_maker = all_to_all(group, flat, received, list(map(len, sent)))
    # they arrive sorted by the rank that made them, and go back into document order
    order = np.argsort(np.argsort(maker[wanted[rank]], kind="stable"))
    mine = by_maker.index_select(0, on_device(order, features.device))
    return mine.unflatten(1, features.shape[1:]).movedim(0, -2)


def balanced_shares(sizes: list[int], ranks: int) -> list[list[int]]:
    """The indices of the items that each rank takes, ascending. The largest item is given out first, and each
    goes to the rank with the least load."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += sizes[i]
    return [sorted(share) for share in shares]


def _makers(shares: list[list[int]], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every feature in document order, the rank that computes it and its row there."""
    starts = np.cumsum([0, *sizes])
    maker, row = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    for rank, share in enumerate(shares):
        features = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(starts[i], starts[i + 1]) for i in share)]
        )
        maker[features], row[features] = rank, np.arange(len(features))
    return maker, row
