"""Validation loss: the mean over all trained tokens of the validation split, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from megatron_vlm.batch import fully_masked
from megatron_vlm.models.schedule import in_evaluation
from megatron_vlm.training.figures import BySource
from megatron_vlm.training.step import Reports, StepLoss, mean_loss, token_losses


@torch.no_grad()
def validation_loss(
    chunks: list[torch.nn.Module],
    take: Callable[[int], list[dict]],
    limit: int = 0,
    sources: Sequence[str] = (),
    step_loss: StepLoss = token_losses,
    logged: Sequence[str] = (),
) -> tuple[float | None, dict[str, float]]:
    """Loss over the micro batches of `take(count)` (the first `limit`; 0: all), None if it gives none; and
    loss, trained tokens and samples of each of `sources`, which samples' keys begin with, and what the
    `step_loss` has `logged`. Collective: `take` gives every rank equally many."""
    by_source = BySource(sources, logged)
    at_once = parallel_state.get_pipeline_model_parallel_world_size()  # keeps the pipeline busy
    sums_alone: Reports = []  # not the losses of all validation tokens
    seen = 0
    with in_evaluation(chunks):
        while not limit or seen < limit:
            micro_batches = take(min(at_once, limit - seen) if limit else at_once)
            if not micro_batches:
                break
            seen += len(micro_batches)
            while len(micro_batches) < at_once:  # the interleaved schedule needs a multiple of the stages
                micro_batches.append(fully_masked(micro_batches[-1]))
            reports, _ = step_loss(chunks, micro_batches, forward_only=True)
            by_source.count(micro_batches, reports)
            sums_alone += [{"sums": report["sums"]} for report in reports]
    if not seen:
        return None, {}
    sums = by_source.sums()
    if len(sums):
        dist.all_reduce(sums)
    return mean_loss(sums_alone)[0], by_source.figures(sums.cpu().numpy())
