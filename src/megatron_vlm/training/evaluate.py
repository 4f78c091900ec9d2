"""Validation loss: the mean over all trained tokens of the validation split, in eval mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state

from megatron_vlm.batch import fully_masked
from megatron_vlm.training.step import forward_backward, mean_loss


@torch.no_grad()
def validation_loss(
    chunks: list[torch.nn.Module], take: Callable[[int], list[dict]], limit: int = 0
) -> float | None:
    """Loss over the micro batches that `take(count)` gives (the first `limit` of them; 0: all); None if it
    gives none. Collective: `take` gives every rank equally many.
    """
    for chunk in chunks:
        chunk.eval()
    at_once = parallel_state.get_pipeline_model_parallel_world_size()  # keeps the pipeline busy
    reports, seen = [], 0
    while not limit or seen < limit:
        micro_batches = take(min(at_once, limit - seen) if limit else at_once)
        if not micro_batches:
            break
        seen += len(micro_batches)
        while len(micro_batches) < at_once:  # the interleaved schedule needs a multiple of the stages
            micro_batches.append(fully_masked(micro_batches[-1]))
        found = forward_backward(chunks, micro_batches, forward_only=True)
        reports += [{"sums": report["sums"]} for report in found]  # not the losses of all validation tokens
    for chunk in chunks:
        chunk.train()
    return mean_loss(reports)[0] if seen else None
