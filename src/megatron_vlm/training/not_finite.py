"""The end of a run whose loss or gradients are not numbers any more."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.job.ranks import AnotherRankFailed
from megatron_vlm.parallel import setup


class NotFinite(ValueError):
    """A loss or gradient is NaN or infinite. `micro_batches`: the indices of those with such a loss, here."""

    def __init__(self, message: str, micro_batches: list[int]):
        super().__init__(message)
        self.micro_batches = micro_batches


def raise_not_finite(what: str, reports: list[dict[str, Tensor]]) -> NoReturn:
    """Raises NotFinite on the first rank with such losses, else (only gradients) on rank 0. Collective."""
    guilty = [n for n, report in enumerate(reports) if not report["sums"].isfinite().all()]
    ranks = dist.get_world_size()
    first = torch.tensor(dist.get_rank() if guilty else ranks, device=setup.device())
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if (speaker := first.item() % ranks) != dist.get_rank():
        raise AnotherRankFailed(f"training: {what}, as rank {speaker} says")
    raise NotFinite(
        f"training: {what}"
        + (f"; not finite are the losses of this rank's micro batches {guilty}" if guilty else "")
        + ". Start again with a lower optimizer.lr or without these samples.",
        guilty,
    )
