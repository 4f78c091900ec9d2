"""The images of a micro batch spread over the tensor-parallel ranks, whose towers are replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.batch import GenericVisualInputs


def spread_over_ranks(
    vision: Callable[..., Tensor],
    visual: GenericVisualInputs,
    visual_tokens: list[int],
    blank: GenericVisualInputs,
    group: dist.ProcessGroup,
) -> Tensor:
    """`vision(**visual)`, each item computed on one rank of the group and gathered on all.

    `visual_tokens` is how many features each item has. A rank without items computes `blank` instead.
    The mean over the group of the gradients of the tower's weights is the whole gradient, just as if every
    rank computed all items.
    """
    items, size, rank = visual.items(), group.size(), group.rank()
    shares = balanced_shares(visual_tokens, size)
    own = GenericVisualInputs.cat([items[i] for i in shares[rank]])
    features = vision(**(own or blank).as_model_kwargs()).movedim(-2, 0)
    if own is None:
        features = features[:0]
    counts = [sum(visual_tokens[i] for i in share) for share in shares]
    gathered = _Gather.apply(features, counts, group)
    order = _document_order(shares, visual_tokens).to(gathered.device, non_blocking=True)
    return gathered.index_select(0, order).movedim(0, -2)


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


def _document_order(shares: list[list[int]], sizes: list[int]) -> Tensor:
    """Indices into the features of all ranks, joined in rank order, that put items in document order."""
    gathered = [i for share in shares for i in share]
    starts = dict(zip(gathered, torch.tensor([0, *(sizes[i] for i in gathered)]).cumsum(0), strict=False))
    return torch.cat([starts[i] + torch.arange(sizes[i]) for i in range(len(sizes))])


class _Gather(torch.autograd.Function):
    """Gathers `counts` rows from each rank. Every rank gets the full gradient of the result; the backward
    keeps this rank's rows, times the number of ranks, because the tower's gradients are averaged later."""

    @staticmethod
    def forward(ctx, rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.split(ctx.counts)[ctx.rank] * len(ctx.counts), None, None
