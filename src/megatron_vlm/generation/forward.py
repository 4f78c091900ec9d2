"""Forward passes of streams through the chunks of a model, and what is told to all ranks that share them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.job import watchdog
from megatron_vlm.models.head import output_logits
from megatron_vlm.models.schedule import run_schedule
from megatron_vlm.models.stream import Stream


def forward(chunks: list[torch.nn.Module], streams: list[Stream]) -> list[Tensor]:
    """The logits (n, V) of each stream's wanted tokens on the last pipeline stage; elsewhere an empty list.

    The streams have one length; with pipelines, they are as many as its stages.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        watchdog.beat()
        return [chunks[0](stream, output_logits) for stream in streams]
    return run_schedule(chunks, streams, _reported, output_logits, forward_only=True)


def _reported(stream: Stream, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_NV.new_zeros(()), logits_NV


def told_by_last_stage(said: Tensor) -> Tensor:
    """The tensor of the last stage's first rank, on every rank that shares the model, on the host."""
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        dist.broadcast(said, group=group, group_src=group.size() - tp)
    return said.cpu()
