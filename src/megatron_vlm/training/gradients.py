"""The buffers of a model's gradients, and their reduction over data-parallel ranks."""

from __future__ import annotations

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from megatron_vlm.config import RunConfig
from megatron_vlm.models.vlm import VLMModel


def data_parallel(chunks: list[VLMModel], config: RunConfig) -> list[DistributedDataParallel]:
    """The chunks with Megatron's fp32 gradient buffers, reduced over data-parallel ranks once per step.

    A bucket's reduction starts as soon as the backward pass of the last micro batch has filled it.
    """
    megatron_config = chunks[0].config
    megatron_config.finalize_model_grads_func = finalize_model_grads
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
