"""Logits of given tokens, under any layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.batch import Batch
from megatron_vlm.models.head import of_all_context_ranks, output_logits
from megatron_vlm.models.schedule import run_schedule, streams_of
from megatron_vlm.models.stream import Stream


@torch.no_grad()
def logits_of(
    chunks: list[torch.nn.Module], micro_batches: list[Batch], wanted: list[np.ndarray] | None = None
) -> list[Tensor]:
    """The logits (n, V) of each micro batch's `wanted` tokens, indices into B * S.
    None: of all tokens, with zeros for padding. An empty list but on the last pipeline stage. Collective."""
    wanted = wanted or [np.arange(batch["input_ids"].numel()) for batch in micro_batches]
    streams = streams_of(chunks, micro_batches, wanted)
    return run_schedule(chunks, streams, _reported, output_logits, forward_only=True)


def _reported(stream: Stream, local_NV: Tensor) -> tuple[Tensor, Tensor]:
    return local_NV.new_zeros(()), of_all_context_ranks(local_NV, stream, dim=0)
