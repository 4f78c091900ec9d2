"""The way of tokens to their experts and back: rows in another order, here and on other ranks.

Indices are made on the device and stay there. Each gradient is a sum in a fixed order, so it is the same at
every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch import distributed as dist

FREE_ROUTE, ROUTE_OF_PADDING = -1, -2  # in place of an expert's number: the router chooses


@dataclass(frozen=True)
class TokenOrder:
    """Rows sorted by a key: the sorted row i was number `places[i]`, and its key is `keys[i]`.

    Unsorted, the `copies` of each original row follow one another.
    """

    keys: Tensor
    places: Tensor
    copies: int

    @classmethod
    def by(cls, keys: Tensor, copies: int = 1) -> TokenOrder:
        """Rows of equal keys stay in their order."""
        return cls(*keys.sort(stable=True), copies)

    def ends(self, numbers: int) -> Tensor:
        """(numbers,) int32: where the rows end whose key is 0, 1, 2, …"""
        all_keys = torch.arange(numbers, device=self.keys.device)
        return torch.searchsorted(self.keys, all_keys, right=True, out_int32=True)


def reordered(rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
    """The copies of rows (N, D), sorted; if it `joins`, the sums of sorted copies (N * copies, D)."""
    return (Reordered.apply if torch.is_grad_enabled() else _reordered)(rows, order, joins)


def _reordered(rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
    copies = order.copies
    if not joins:
        return rows.index_select(0, order.places // copies if copies > 1 else order.places)
    unsorted = torch.empty_like(rows).index_copy_(0, order.places, rows)
    return unsorted if copies == 1 else unsorted.unflatten(0, (len(rows) // copies, copies)).sum(1)


class Reordered(torch.autograd.Function):
    """`reordered`. The gradient of sorted copies is the sum of copies, and the other way round."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
        ctx.order = order
        ctx.joins = joins
        return _reordered(rows, order, joins)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Reordered.apply(gradient, ctx.order, not ctx.joins), None, None


class ExpertExchange:
    """Rows sorted by expert that travel to the ranks of their experts.

    `counts_X` are this rank's rows of every expert. Afterwards `experts` (Z) says for which expert here each
    received row is. Collective; the host waits once, for the numbers.
    """

    def __init__(self, counts_X: Tensor, group: dist.ProcessGroup):
        self._group, ranks = group, group.size()
        sent = counts_X.view(ranks, -1)
        received = torch.empty_like(sent)  # [rank, expert]: rows that the rank has for an expert of mine
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        self._sent, self._received = torch.stack((sent.sum(1), received.sum(1))).tolist()
        numbers = torch.arange(received.shape[1], device=received.device).repeat(ranks)
        self.experts = numbers.repeat_interleave(received.flatten(), output_size=sum(self._received))

    def there(self, rows: Tensor) -> Tensor:
        return all_to_all(self._group, rows, self._received, self._sent)

    def back(self, rows: Tensor) -> Tensor:
        return all_to_all(self._group, rows, self._sent, self._received)
