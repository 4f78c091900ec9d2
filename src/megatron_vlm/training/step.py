"""One optimizer step: forward and backward over the micro batches, one loss over all their trained tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch import distributed as dist
from torch.profiler import record_function

from megatron_vlm.batch import Batch
from megatron_vlm.models.schedule import run_schedule
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel import setup
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.gradients import empty_gradients, finalize_gradients, step_in_flight
from megatron_vlm.training.not_finite import raise_not_finite

Reports = list[dict[str, Tensor]]  # of micro batches on the last pipeline stage; elsewhere empty
# (chunks, micro batches, forward_only=False) -> (reports, the sum of this rank's weights in the mean loss);
# unless forward_only, gradients of the sum of all losses are then in this rank's buffers
StepLoss = Callable[..., tuple[Reports, float]]


def token_losses(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], forward_only: bool = False
) -> tuple[Reports, float]:
    """A `StepLoss`: the losses of the trained tokens, by their weights. Reports are `token_loss`'s."""
    streams = streams_of(chunks, micro_batches)
    reports = run_schedule(chunks, streams, token_loss, forward_only=forward_only)
    return reports, sum(stream.trained_weight for stream in streams)


def token_loss(stream: Stream, losses_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(weighted sum over trained tokens, report). A mean over them would make the loss a mean of means.

    The report's `sums` are the loss, the weights, the number of tokens; its weighted `losses` belong to the
    trained tokens at `places` of the micro batch.
    """
    losses_N = losses_N if stream.weights is None else losses_N * stream.weights
    total = losses_N.sum()
    count = torch.full_like(total, len(losses_N))
    weight = count if stream.weights is None else stream.weights.double().sum()
    sums = torch.stack([x.detach().double() for x in (total, weight, count)])
    return total, {"sums": sums, "losses": losses_N.detach(), "places": stream.output_places}


def streams_of(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], wanted: list[np.ndarray] | None = None
) -> list[Stream]:
    """The micro batches on the device, padded so that sequence parallelism can cut them; of one length for
    pipelines.

    The micro batches are on the host, their pixels on the device. `wanted` has for each the indices into
    B * S of the tokens whose outputs are computed; None: the trained tokens.
    """
    layout = get_attr_wrapped_model(chunks[0], "layout")
    layouts = [layout(batch) for batch in micro_batches]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    lengths = [-(-max(layout.longest, 1) // tp) * tp for layout in layouts]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        lengths = [max(lengths)] * len(lengths)
    rank = parallel_state.get_context_parallel_rank()
    windows = get_model_config(chunks[0]).layer_windows or (None,)
    return [
        layout.stream(rank, length, windows, setup.device(), places)
        for layout, length, places in zip(layouts, lengths, wanted or [None] * len(lengths), strict=True)
    ]


@record_function("step")
def train_step(
    chunks: list[DistributedDataParallel],
    optimizer,
    scheduler,
    micro_batches: list[Batch],
    figures: StepFigures | None = None,
    goes_on: bool = False,
    step_loss: StepLoss = token_losses,
):
    """(mean loss, trained tokens, gradient norm) of one global batch, the same on every rank.

    `figures` then tell of this step. `goes_on`: the next to use the parameters is a forward pass of the
    chunks; until then the shares of other ranks may be on their way (`step_in_flight`). If loss or norm
    are not finite, one rank raises NotFinite and the others AnotherRankFailed; the weights are then unusable.
    """
    for chunk in chunks:
        empty_gradients(chunk)
    optimizer.zero_grad()
    reports, weight = step_loss(chunks, micro_batches)
    finalize_gradients(chunks, weight)
    if figures:
        figures.count(micro_batches, reports)
    with record_function("optimizer"):
        updated, grad_norm, _ = step_in_flight(optimizer, chunks) if goes_on else optimizer.step()
    if updated:
        scheduler.step(increment=1)
    loss, tokens = mean_loss(reports, figures)
    if not math.isfinite(loss) or not math.isfinite(grad_norm or 0):
        what = f"the loss is {loss} over {tokens} trained tokens, the gradient norm {grad_norm}"
        raise_not_finite(what, reports)
    return loss, tokens, grad_norm


def mean_loss(reports: list[dict[str, Tensor]], figures: StepFigures | None = None) -> tuple[float, int]:
    """Mean loss over all trained tokens of all ranks, by their weights, and their number; NaN for none.

    Collective: the last stage's reports are summed over data-parallel ranks and sent to all ranks, and with
    them the figures of the step, which a rank reads from its device here and nowhere else.
    """
    total = torch.zeros(3, dtype=torch.float64, device=setup.device())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for report in reports:
            total += report["sums"]
    if figures:
        total = torch.cat((total, figures.of_this_rank()))
    dist.all_reduce(total)
    loss_sum, weight, count, *sums = total.tolist()
    if figures:
        figures.added(sums)
    return (loss_sum / weight if weight else float("nan")), int(count)
