"""Micro batches as streams, and streams through a model's chunks by Megatron's schedule for the layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_vlm.batch import Batch
from megatron_vlm.job import watchdog
from megatron_vlm.models.head import output_losses
from megatron_vlm.models.language_model import extras_between_stages
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel import setup

# (stream, what the head made of it) -> (a scalar whose gradient is added to the others', what to report)
StreamLoss = Callable[[Stream, Tensor], tuple[Tensor, Any]]


def run_schedule(
    chunks: list[torch.nn.Module],
    streams: list[Stream],
    loss: StreamLoss,
    head: Callable[..., Tensor] = output_losses,
    forward_only: bool = False,
) -> list:
    """Returns what `loss` reports of each stream, on the last pipeline stage; elsewhere an empty list.

    `head`, a function of `models.head`, makes the outputs. Unless `forward_only`, gradients are added to this
    rank's buffers. The streams have one length if there are pipeline stages.
    """
    iterators = list(tee(streams, len(chunks)))
    ranks = parallel_state.get_context_parallel_world_size()
    return get_forward_backward_func()(
        forward_step_func=partial(vlm_step, loss, head),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(streams),
        seq_length=streams[0].input_ids.shape[1] * ranks,  # Megatron divides it by their number
        micro_batch_size=1 + extras_between_stages(get_model_config(chunks[0])),
        forward_only=forward_only,
    )


def vlm_step(
    loss: StreamLoss, head: Callable[..., Tensor], streams: Iterator[Stream], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, int, Any]]]:
    """Moves the next stream through one chunk. With its first two arguments bound, it is Megatron's step."""
    watchdog.beat()
    stream = next(streams)

    def loss_of_output(output: Tensor) -> tuple[Tensor, int, Any]:
        scalar, report = loss(stream, output)
        return scalar, 0, report  # no tokens for Megatron to divide by: `reduce_gradients` divides

    return model(stream, head), loss_of_output


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


@contextmanager
def in_evaluation(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Puts the chunks into evaluation mode, and each back into its own mode at the end."""
    were_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.train(was_training)
