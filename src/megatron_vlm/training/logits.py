"""Logits of given tokens, under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import Batch
from megatron_vlm.models.head import output_logits
from megatron_vlm.models.stream import Stream
from megatron_vlm.training.step import forward_backward


@torch.no_grad()
def logits_of(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], wanted: list[np.ndarray] | None = None
) -> list[Tensor]:
    """The logits (n, V) of each micro batch's `wanted` tokens, indices into B * S; None: of all tokens, in
    which those of padding are zero. On the last pipeline stage; elsewhere an empty list. Collective."""
    wanted = wanted or [np.arange(batch["input_ids"].numel()) for batch in micro_batches]
    reports = forward_backward(chunks, micro_batches, _logits_step, forward_only=True, wanted=wanted)
    return [report["logits"] for report in reports]


def _logits_step(data_iterator: Iterator[Stream], model: torch.nn.Module):
    stream = next(data_iterator)
    return model(stream, output_logits), partial(_report_logits, stream)


def _report_logits(stream: Stream, held: Tensor):
    whole = held.new_zeros(stream.outputs, held.shape[1]).index_copy(0, stream.output_places, held)
    if parallel_state.get_context_parallel_world_size() > 1:  # each rank has the logits of its tokens
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    zero = whole.new_zeros(())
    return zero, zero.int(), {"logits": whole}
