"""The losses of trained tokens, and what the loss of any objective gives to a training step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_vlm.batch import Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.models.schedule import run_schedule, streams_of
from megatron_vlm.models.stream import Stream

Reports = list[dict[str, Tensor]]  # of micro batches on the last pipeline stage; elsewhere empty
# (chunks, micro batches, forward_only=False) -> (reports, the sum of their weights in the mean loss);
# unless forward_only, gradients of the sum of all losses are then in this rank's buffers
StepLoss = Callable[..., tuple[Reports, float]]


def of_run(config: RunConfig, chunks: list[nn.Module]) -> StepLoss:
    """The loss of `objectives.TOKENS`, which needs neither."""
    return token_losses


def token_losses(
    chunks: list[nn.Module], micro_batches: list[Batch], forward_only: bool = False
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
