"""Streams through Megatron's schedule for the layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import tee

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_vlm.models.layers.deepstack import extras_between_stages
from megatron_vlm.models.stream import Stream


def run_schedule(
    chunks: list[torch.nn.Module], streams: list[Stream], forward_step: Callable, forward_only: bool
) -> list:
    """What the loss function of `forward_step` reported of each stream, on the last stage.

    The streams have one length if there are pipeline stages.
    """
    iterators = list(tee(streams, len(chunks)))
    ranks = parallel_state.get_context_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(streams),
        seq_length=streams[0].input_ids.shape[1] * ranks,  # Megatron divides it by their number
        micro_batch_size=1 + extras_between_stages(get_model_config(chunks[0])),
        forward_only=forward_only,
    )
