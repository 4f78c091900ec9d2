"""Outputs of a stream's wanted tokens, from all context-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.models.stream import Stream


def whole(local_kn: Tensor, stream: Stream) -> Tensor:
    """The outputs (k, N) of all of a stream's wanted tokens, of which this rank has `local_kn` (k, n).

    Every context-parallel rank must then compute the same loss of them: the gradient of its own goes back.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return local_kn
    zeros = local_kn.new_zeros(len(local_kn), stream.outputs)
    return _Sum.apply(zeros.index_copy(1, stream.output_places, local_kn))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient
