"""Forward passes of streams through the chunks of a model, and what is told to all ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.job import watchdog
from megatron_vlm.models.head import output_logits
from megatron_vlm.models.layers.deepstack import extras_between_stages
from megatron_vlm.models.stream import Stream


def forward(chunks: list[torch.nn.Module], streams: list[Stream]) -> list[Tensor]:
    """The logits (n, V) of each stream's wanted tokens on the last pipeline stage; elsewhere an empty list.

    The streams have one length; with pipelines, they are as many as its stages.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        watchdog.beat()
        return [
            gather_from_tensor_model_parallel_region(chunks[0](stream, output_logits)) for stream in streams
        ]
    iterators = list(tee(streams, len(chunks)))
    ranks = parallel_state.get_context_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(streams),
        seq_length=streams[0].input_ids.shape[1] * ranks,  # Megatron divides it by their number
        micro_batch_size=1 + extras_between_stages(get_model_config(chunks[0])),
        forward_only=True,
    )


def _step(data_iterator: Iterator[Stream], model: torch.nn.Module):
    watchdog.beat()
    return model(next(data_iterator), output_logits), _report


def _report(logits_NV: Tensor):
    zero = logits_NV.new_zeros(())
    return zero, zero.int(), gather_from_tensor_model_parallel_region(logits_NV)


def told_by_last_stage(said: Tensor) -> Tensor:
    """The tensor of the last stage's first rank, on every rank that shares the model, on the host."""
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        dist.broadcast(said, group=group, group_src=group.size() - tp)
    return said.cpu()
