"""One optimizer step: forward and backward over the micro batches, one loss over all their trained tokens.

Data-parallel ranks exchange their gradients, which are reduced during the backward pass, the norm of these,
and the parameters that each rank's share of the optimizer has changed: they are gathered while the next step
begins.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, nn
from torch import distributed as dist
from torch.futures import Future
from torch.profiler import record_function

from megatron_vlm.batch import Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.job.errors import AnotherRankFailed
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.parallel import setup
from megatron_vlm.training.figures import StepFigures
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
    is_last: bool = True,
):
    """(mean loss, trained tokens, gradient norm) of one global batch, the same on every rank.

    `figures` then tell of this step, and of those before it that were not the `is_last` of a run's step; the
    learning rate, too, moves with the last alone. `goes_on`: the next to use the parameters is a forward pass
    of the chunks; until then the shares of other ranks may be on their way (`step_with_overlapped_gather`).
    If loss or norm are not finite, one rank raises NotFinite and the others AnotherRankFailed; if the loss
    was not but its gradients were, the weights are unusable then.
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
    read = figures if is_last else None
    judged = None if judge is None else mean_loss(reports, read)
    takes = math.isfinite if judge is None else partial(judge, judged[0])
    step = partial(clip_and_step, optimizer, takes)
    with record_function("optimizer"):
        updated, grad_norm, _ = step_with_overlapped_gather(step, chunks) if goes_on else step()
    if is_last and (updated or judged):
        scheduler.step(increment=1)
    loss, tokens = judged or mean_loss(reports, read)
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        problem = f"the loss is {loss} over {tokens} trained tokens, the gradient norm {grad_norm}"
        raise_not_finite(problem, reports, getattr(step_loss, "place", None))
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


def raise_not_finite(problem: str, reports: Reports, function: str | None = None) -> NoReturn:
    """Raises NotFinite on the first rank with such losses, else (only gradients) on rank 0. Collective.

    `function` names a user's loss, which is to blame if the tokens' log-probabilities are finite.
    """
    guilty = [n for n, report in enumerate(reports) if not report["sums"].isfinite().all()]
    ranks = dist.get_world_size()
    first = torch.tensor(dist.get_rank() if guilty else ranks, device=setup.device())
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if (speaker := first.item() % ranks) != dist.get_rank():
        raise AnotherRankFailed(f"training: {problem}, as rank {speaker} says")
    remedy = "Start again with a lower optimizer.lr or without these samples"
    if guilty:
        problem += f"; not finite are the losses of this rank's micro batches {guilty}"
        if function and all(reports[n]["losses"].isfinite().all() for n in guilty):
            problem += f", from {function}, which got finite log-probabilities"
            remedy = "Correct that function"
    raise NotFinite(f"training: {problem}. {remedy}.", guilty)


def data_parallel(
    chunks: list[VLMModel], config: RunConfig, one_backward: bool = True
) -> list[DistributedDataParallel]:
    """The chunks with Megatron's gradient buffers, which `reduce_gradients` reduces once per step.

    With `one_backward` a schedule runs once per step, and the reduction of a bucket starts as soon as the
    backward pass of its last micro batch has filled it. Without, schedules only add to the buffers, any
    number of times. A forward pass waits for parameters that `step_with_overlapped_gather` left on their way.
    """
    megatron_config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.optimizer.reduce_in_fp32,
        overlap_grad_reduce=one_backward,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    wrapped = [DistributedDataParallel(megatron_config, ddp, chunk) for chunk in chunks]
    # without it, schedules would start a reduction in every micro batch
    no_sync = [chunk.no_sync for chunk in wrapped]
    megatron_config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    for chunk in wrapped:
        for module, needed in _first_uses(chunk):
            module.register_forward_pre_hook(partial(_arrived, needed))
        groups = (
            (chunk.bucket_groups, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (chunk.expert_parallel_bucket_groups, parallel_state.get_expert_data_parallel_group()),
        )
        for bucket_groups, ranks in groups:
            for buckets in bucket_groups if ranks.size() == 1 else ():
                _exchange_nothing(buckets)
    return wrapped


def _exchange_nothing(buckets: Buckets) -> None:
    """For a single data-parallel rank: gloo would copy all gradients and parameters onto themselves.

    Megatron's `start_grad_sync` also scales gradients, by 1 with `calculate_per_token_loss`, which we have.
    """
    done = Future()
    done.set_result(None)

    def start_grad_sync(force_all_reduce: bool = False) -> None:
        buckets.grad_reduce_handle = done

    def start_param_sync(force_sync: bool = False) -> None:
        """There are no other ranks' shares."""

    buckets.start_grad_sync = start_grad_sync
    buckets.start_param_sync = start_param_sync


Taken = tuple[bool, float | None, int | None]  # what Megatron's `optimizer.step` returns


def step_with_overlapped_gather(step: Callable[[], Taken], chunks: list[DistributedDataParallel]) -> Taken:
    """Returns as `step`, an optimizer's, while parameters that other ranks have changed are on their way.

    Call it where a forward pass of the chunks comes next: that waits for each layer's parameters before the
    layer. To look at parameters otherwise, call `step` itself.
    """
    settings = chunks[0].ddp_config
    if not settings.use_distributed_optimizer:
        return step()
    # Megatron's own hooks (0.19) wait before the module that has a parameter runs; some are used elsewhere,
    # such as the output layer's. They also start a bucket where it is used, and ranks must not differ in
    # that. So the setting is off when modules get hooks, and on for who gathers: without waiting, and we do.
    settings.overlap_param_gather = True
    try:
        done = step()
        for chunk in chunks:
            for buckets in dict.fromkeys(bucket for _, needed in _first_uses(chunk) for bucket in needed):
                buckets.start_param_sync()
    finally:
        settings.overlap_param_gather = False
    return done


@torch.no_grad()
def clip_and_step(optimizer: MegatronOptimizer, takes: Callable[[float], bool] = math.isfinite) -> Taken:
    """Whether a step was taken with the reduced gradients, and their norm. `takes` decides by the norm; if it
    says no, nothing has changed but the gradients. `optimizer.step()` (0.19) takes the norm too late."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if is_taken := takes(norm):
        for part in optimizer.chained_optimizers:
            # as clip_grad_by_total_norm_fp32 of Megatron, which asks each gradient for its CUDA type
            factor = part.config.clip_grad / (norm + 1e-6)
            gradients = [param.grad for param in part.get_parameters() if param.grad is not None]
            if 0 < factor < 1 and gradients:
                torch._foreach_mul_(gradients, factor)
        optimizer.step_with_ready_grads()
    return is_taken, norm, None


def _first_uses(chunk: DistributedDataParallel) -> list[tuple[nn.Module, list[Buckets]]]:
    """(module, the buckets that must have arrived before it runs), in the order of the forward pass.

    The output layer's weight is used after the last norm. What is in no layer, such as tower, embedding and
    adapters, must have arrived before the model runs: so wherever else it is used, it is there.
    """
    model, decoder = chunk.module, chunk.module.language_model.decoder
    uses = [(layer, list(layer.parameters())) for layer in decoder.layers]
    if decoder.final_layernorm is not None:
        head = decoder.final_layernorm, model.language_model.output_layer
        uses.append((head[0], [param for module in head for param in module.parameters()]))
    later = {param for _, params in uses for param in params}
    uses.insert(0, (model, [param for param in model.parameters() if param not in later]))
    groups_of_params = chunk.param_to_bucket_group  # of trained parameters
    return [
        (
            module,
            list(dict.fromkeys(groups_of_params[param] for param in params if param in groups_of_params)),
        )
        for module, params in uses
    ]


def _arrived(needed: list[Buckets], *_) -> None:
    for buckets in needed:
        if buckets.param_gather_handle is not None:
            buckets.start_param_sync(force_sync=True)  # waits for what was started


def reduce_gradients(chunks: list[DistributedDataParallel], weight: float | None = None) -> None:
    """Sums the gradients over all ranks, and divides them by the sum of the data-parallel ranks' `weight`.

    Megatron sums each bucket, and then what tensor-parallel ranks or first and last stage hold alike.
    `weight` is the same on ranks that have the same micro batches; None: they are not divided. Megatron's
    schedules would divide by a whole number of tokens, of at least one.
    """
    finalize_model_grads(chunks)
    if weight is None:
        return
    total = torch.full((), weight, dtype=torch.float64, device=setup.device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    scaling = 1.0 / torch.where(total > 0, total, 1).float()
    for chunk in chunks:
        chunk.scale_gradients(scaling)


def empty_gradients(chunk: DistributedDataParallel) -> None:
    """Empties the gradient buffers before a step.

    Megatron reduces a bucket when as many gradients have come as in the first step, and expects one of every
    parameter. Those that a model never uses, such as layers after the tower's last used one, count as come.
    """
    groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    for group in groups:
        if group.per_param_grad_ready_counts:  # of the step before
            group.per_param_grad_ready_counts |= dict.fromkeys(
                group.params - group.per_param_grad_ready_counts.keys(), 0
            )
    chunk.zero_grad_buffer()
    for group in groups:
        expected = group.golden_per_param_grad_ready_counts
        group.per_param_grad_ready_counts |= {param: 0 for param, count in expected.items() if not count}


def take_norms_on_device() -> None:
    """Let Megatron take the norm of all gradients in one operation.

    Its fallback where there is no Transformer Engine or Apex (0.19) asks the device for the norm of each
    tensor. The numbers are the same.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm


def _norm(chunk_size, overflow, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The norm (1,) of all tensors; the arguments are as in Apex's `multi_tensor_l2norm`."""
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm().view(1), None
