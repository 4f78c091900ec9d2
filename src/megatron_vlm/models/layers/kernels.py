"""Attention of segments: queries that see keys of their own segment only. Kernels of one signature.

A segment is a run of queries and a run of keys. The last query is aligned with the last key; query i of n may
see key j of m exactly if  -left <= j - (i + m - n) <= right,  where None is no limit. This is what
`torch.nn.attention.varlen` and flash-attention call a window aligned at the bottom right.

A kernel is a pair of functions on tensors (tokens, heads, K), keys and values with as many or fewer heads:
    forward(query, key, value, segments, scale) -> context, log_sum_exp (H, tokens)
    backward(gradient, (query, key, value), (context, log_sum_exp), segments, scale) -> their gradients
`backward` needs only what the softmax was divided by. So context and log_sum_exp may come from several calls,
and each call's backward gives its part of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

QUERIES_AT_ONCE = 512  # of a segment with a mask: so the largest mask is linear in the length of a row
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value, or their gradients
Outputs = tuple[Tensor, Tensor]  # context, log_sum_exp
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Segments:
    """Lengths of segments on the host, and their bounds on the device of the kernel.

    The queries of all segments, one after the other, are the rows of the kernel's query; so are the keys.
    """

    query_lengths: np.ndarray
    key_lengths: np.ndarray
    left: int | None
    right: int | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """(segments + 1,) int32 for queries and keys; the same tensor if the lengths are the same, because
        cuDNN takes only that for causal attention."""
        queries = on_device(_bounds(self.query_lengths), self.device)
        if np.array_equal(self.query_lengths, self.key_lengths):
            return queries, queries
        return queries, on_device(_bounds(self.key_lengths), self.device)

    @cached_property
    def longest(self) -> tuple[int, int]:
        return int(self.query_lengths.max(initial=0)), int(self.key_lengths.max(initial=0))


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], lengths)).cumsum().astype(np.int32)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on a device; from pinned memory to CUDA, so that the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Kernel(NamedTuple):
    """See the module."""

    forward: Callable[..., Outputs]
    backward: Callable[..., Inputs]


class Part(NamedTuple):
    """Queries and keys of one call of the CPU kernel."""

    queries: slice
    keys: slice
    causal: bool  # as many keys as queries, none later
    mask: Tensor | None  # (queries, keys) to add to the scores


def documents_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Outputs:
    """The kernel in plain PyTorch: its flash attention for CPUs, one call for each segment or part of one."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    contexts, log_sums = [], []
    for part in _parts(segments, query):
        q, k, v = query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys]
        context, log_sum = flash(q, k, v, 0.0, part.causal, attn_mask=part.mask, scale=scale)
        contexts.append(context[0].transpose(0, 1))
        log_sums.append(log_sum[0])
    return torch.cat(contexts), torch.cat(log_sums, dim=1)


def documents_backward(
    gradient: Tensor, inputs: Inputs, outputs: Outputs, segments: Segments, scale: float
) -> Inputs:
    """See the module."""
    context, log_sum_exp = outputs
    gradient, query, key, value, context = (x.transpose(0, 1)[None] for x in (gradient, *inputs, context))
    totals = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for part in _parts(segments, query):
        q, k, v = query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys]
        dc = gradient[:, :, part.queries]
        c = context[:, :, part.queries]
        log_sum = log_sum_exp[None, :, part.queries]
        grads = flash_backward(dc, q, k, v, c, log_sum, 0.0, part.causal, attn_mask=part.mask, scale=scale)
        totals[0][:, :, part.queries] = grads[0]
        for total, grad in zip(totals[1:], grads[1:], strict=True):
            total[:, :, part.keys] += grad
    return tuple(x[0].transpose(0, 1) for x in totals)


def _parts(segments: Segments, scores_like: Tensor) -> Iterator[Part]:
    """Whole segments where no mask is needed, else runs of their queries with the keys that they see."""
    first_query = first_key = 0
    left, right = segments.left, segments.right
    for n, m in zip(segments.query_lengths.tolist(), segments.key_lengths.tolist(), strict=True):
        unlimited = left is None or left >= m - 1
        is_plain = unlimited and (right is None or (right == 0 and n == m))
        at_once = max(n, 1) if is_plain else QUERIES_AT_ONCE
        for start in range(0, max(n, 1), at_once):
            stop = min(start + at_once, n)
            # query i is aligned with key i + m - n
            low = 0 if left is None else max(0, start + m - n - left)
            high = m if right is None else min(m, stop + m - n + right)
            queries = slice(first_query + start, first_query + stop)
            keys = slice(first_key + low, first_key + high)
            mask = None
            if not is_plain:
                query_of = torch.arange(start + m - n, stop + m - n, device=scores_like.device)
                distance = torch.arange(low, high, device=scores_like.device) - query_of[:, None]
                mask = torch.zeros_like(distance, dtype=scores_like.dtype)
                if left is not None:
                    mask.masked_fill_(distance < -left, -torch.inf)
                if right is not None:
                    mask.masked_fill_(distance > right, -torch.inf)
            yield Part(queries, keys, is_plain and right == 0, mask)
        first_query += n
        first_key += m


def varlen_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Outputs:
    """torch's kernel for CUDA, in 16 bits. It has not run on a GPU yet."""
    from torch.nn.attention.varlen import _varlen_attn

    options = _varlen_options(segments, scale) | {"enable_gqa": query.shape[1] != key.shape[1]}
    context, log_sum_exp, _ = _varlen_attn(query, key, value, *segments.bounds, *segments.longest, **options)
    return context, log_sum_exp


def varlen_backward(
    gradient: Tensor, inputs: Inputs, outputs: Outputs, segments: Segments, scale: float
) -> Inputs:
    """See the module. The kernel has no dropout, so the state of its generator is of no use."""
    from torch.nn.attention.varlen import _varlen_attn_backward

    unused_state = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
    options = _varlen_options(segments, scale) | {"rng_state": unused_state}
    q, k, v = inputs
    c, log_sum = outputs
    dc = gradient.contiguous()
    return _varlen_attn_backward(dc, q, k, v, c, log_sum, *segments.bounds, *segments.longest, **options)


def _varlen_options(segments: Segments, scale: float) -> dict[str, Any]:
    window = [-1 if limit is None else limit for limit in (segments.left, segments.right)]
    return {"is_causal": window == [-1, 0], "scale": scale, "window_size": window}


KERNELS = {
    "documents": Kernel(documents_forward, documents_backward),
    "varlen": Kernel(varlen_forward, varlen_backward),
}
