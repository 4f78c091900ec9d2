"""One optimizer step: forward and backward over the micro batches, one loss over all their trained tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import distributed as dist
from torch.profiler import record_function

from megatron_vlm.batch import Batch
from megatron_vlm.job.errors import AnotherRankFailed
from megatron_vlm.parallel import setup
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.gradients import (
    clip_and_step,
    empty_gradients,
    reduce_gradients,
    step_with_overlapped_gather,
)
from megatron_vlm.training.losses import Reports, StepLoss, token_losses


class NotFinite(ValueError):
    """A loss or gradient is NaN or infinite. `micro_batches`: the indices of those with such a loss, here."""

    def __init__(self, message: str, micro_batches: list[int]):
        super().__init__(message)
        self.micro_batches = micro_batches


@record_function("step")
def train_step(
    chunks: list[DistributedDataParallel],
    optimizer,
    scheduler,
    micro_batches: list[Batch],
    figures: StepFigures | None = None,
    goes_on: bool = False,
    step_loss: StepLoss = token_losses,
    judge: Callable[[float, float], bool] | None = None,
):
    """(mean loss, trained tokens, gradient norm) of one global batch, the same on every rank.

    `figures` then tell of this step. `goes_on`: the next to use the parameters is a forward pass of the
    chunks; until then the shares of other ranks may be on their way (`step_with_overlapped_gather`). If
    loss or norm are not finite, one rank raises NotFinite and the others AnotherRankFailed; if the loss was
    not but its gradients were, the weights are unusable then.
    `judge` gets the loss and the gradient norm, for which every step then waits, and says whether the step
    may change the weights; one that may not trains no tokens.
    """
    for chunk in chunks:
        empty_gradients(chunk)
    optimizer.zero_grad()
    reports, weight = step_loss(chunks, micro_batches)
    reduce_gradients(chunks, weight)
    if figures:
        figures.count(micro_batches, reports)
    # a judge decides by the loss too, which is otherwise read after the update, when it is there anyway
    judged = None if judge is None else mean_loss(reports, figures)
    takes = math.isfinite if judge is None else partial(judge, judged[0])
    step = partial(clip_and_step, optimizer, takes)
    with record_function("optimizer"):
        updated, grad_norm, _ = step_with_overlapped_gather(step, chunks) if goes_on else step()
    if updated or judged:
        scheduler.step(increment=1)
    loss, tokens = judged or mean_loss(reports, figures)
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        problem = f"the loss is {loss} over {tokens} trained tokens, the gradient norm {grad_norm}"
        raise_not_finite(problem, reports)
    return loss, tokens if updated or not judged else 0, grad_norm


def mean_loss(reports: Reports, figures: StepFigures | None = None) -> tuple[float, int]:
    """Mean loss over all trained tokens of all ranks, by their weights, and their number; NaN for none.

    Collective: the last stages' reports are summed over all ranks, and with them the figures of the step,
    which a rank reads from its device here and nowhere else.
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
        figures.sums = sums
    return (loss_sum / weight if weight else float("nan")), int(count)


def raise_not_finite(problem: str, reports: Reports) -> NoReturn:
    """Raises NotFinite on the first rank with such losses, else (only gradients) on rank 0. Collective."""
    guilty = [n for n, report in enumerate(reports) if not report["sums"].isfinite().all()]
    ranks = dist.get_world_size()
    first = torch.tensor(dist.get_rank() if guilty else ranks, device=setup.device())
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if (speaker := first.item() % ranks) != dist.get_rank():
        raise AnotherRankFailed(f"training: {problem}, as rank {speaker} says")
    raise NotFinite(
        f"training: {problem}"
        + (f"; not finite are the losses of this rank's micro batches {guilty}" if guilty else "")
        + ". Start again with a lower optimizer.lr or without these samples.",
        guilty,
    )
