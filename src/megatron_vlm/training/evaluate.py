"""A model without training: the loss of the validation split, and logits of given tokens, in any layout."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import Batch, fully_masked
from megatron_vlm.config import RunConfig
from megatron_vlm.models.head import of_all_context_ranks, output_logits
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import in_evaluation, run_schedule, streams_of
from megatron_vlm.objectives import objective_of
from megatron_vlm.training.figures import BySource
from megatron_vlm.training.losses import Reports, StepLoss
from megatron_vlm.training.step import mean_loss


@torch.no_grad()
def validation_loss(
    config: RunConfig,
    chunks: list[torch.nn.Module],
    step_loss: StepLoss,
    take: Callable[[int], list[dict]],
    sources: Sequence[str] = (),
) -> tuple[float | None, dict[str, float]]:
    """Loss over the micro batches of `take(count)` (the first `train.eval_steps`; 0: all), None if it gives
    none; and loss, trained tokens and samples of each of `sources`, which samples' keys begin with, and the
    objective's figures. Collective: `take` gives every rank equally many."""
    by_source, limit = BySource(sources, objective_of(config).figures), config.train.eval_steps
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


@torch.no_grad()
def logits_of(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], positions: list[np.ndarray] | None = None
) -> list[Tensor]:
    """The logits (n, V) of the tokens at each micro batch's `positions`, indices into B * S.
    None: of all tokens, with zeros for padding. An empty list but on the last pipeline stage. Collective."""
    positions = positions or [np.arange(batch["input_ids"].numel()) for batch in micro_batches]
    streams = streams_of(chunks, micro_batches, positions)
    return run_schedule(chunks, streams, _reported, output_logits, forward_only=True)


def _reported(stream: Stream, local_NV: Tensor) -> tuple[Tensor, Tensor]:
    return local_NV.new_zeros(()), of_all_context_ranks(local_NV, stream, dim=0)
