"""The buffers of a model's gradients, their reduction over data-parallel ranks, and their norm."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_model_config, local_multi_tensor_l2_norm
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.config import RunConfig
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.parallel import setup


def data_parallel(chunks: list[VLMModel], config: RunConfig) -> list[DistributedDataParallel]:
    """The chunks with Megatron's fp32 gradient buffers, reduced over data-parallel ranks once per step.

    A bucket's reduction starts as soon as the backward pass of the last micro batch has filled it.
    """
    megatron_config = chunks[0].config
    megatron_config.finalize_model_grads_func = finalize_gradients
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    wrapped = [DistributedDataParallel(megatron_config, ddp, chunk) for chunk in chunks]
    # without it, schedules would start a reduction in every micro batch
    megatron_config.no_sync_func = [chunk.no_sync for chunk in wrapped]
    if len(wrapped) == 1:
        megatron_config.no_sync_func = wrapped[0].no_sync
    return wrapped


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any
) -> None:
    """Megatron's `finalize_model_grads`, but gradients are divided by the sum of all loss weights of the
    global batch. Megatron divides by a whole number of tokens, of at least one, and by nothing if it is None.
    """
    finalize_model_grads(chunks, None, **options)
    if num_tokens is None:
        return
    own = get_model_config(chunks[0]).step_weight  # the same on every rank that has the same micro batches
    weight = torch.full((), own, dtype=torch.float64, device=setup.device())
    dist.all_reduce(weight, group=parallel_state.get_data_parallel_group())
    scaling = 1.0 / torch.where(weight > 0, weight, 1).float()
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


def clip_on_device() -> None:
    """Lets Megatron take the norm of gradients, and scale them, in one operation each.

    Its fallback where there is no Transformer Engine or Apex (0.19) asks the device for the norm of each
    tensor, and copies each to scale it. The numbers are the same.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


def _norm(chunk_size, overflow, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The norm (1,) of all tensors; the arguments are those of Apex's `multi_tensor_l2norm`."""
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm().view(1), None


def _scale(chunk_size, overflow, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Those of `multi_tensor_scale`; Megatron gives the same gradients as source and target."""
    source, target = tensor_lists
    assert source is target
    if target:
        torch._foreach_mul_(target, factor)
