"""Attention of segments: queries that see keys of their own segment only. Kernels of one signature.

A segment is a run of queries and a run of keys. The last query is aligned with the last key; query i of n may
see key j of m exactly if  -left <= j - (i + m - n) <= right,  where None is no limit. This is what
`torch.nn.attention.varlen` and FlashAttention call a window aligned at the bottom right.

A kernel is a pair of functions on tensors (tokens, heads, K), keys and values with as many or fewer heads:
    forward(query, key, value, segments, scale) -> context, log_sum_exp (H, tokens)
    backward(gradient, (query, key, value), (context, log_sum_exp), segments, scale) -> their gradients
`backward` needs only what the softmax was divided by. So context and log_sum_exp may come from several calls,
and each call's backward gives its part of the gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module, metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_vlm.parallel.linears import check, difference
from megatron_vlm.parallel.setup import on_device

WIDEST = 256  # channels of the widest heads for which CUDA has a kernel
QUERIES_AT_ONCE = 512  # of a segment with a mask: so the largest mask is linear in the length of a row
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value, or their gradients
Outputs = tuple[Tensor, Tensor]  # context, log_sum_exp

# torch's private operators that the package calls, with the arguments that it hands them, in torch's order
PRIVATE = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
    "return_debug_mask scale window_size_left window_size_right",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k "
    "dropout_p is_causal rng_state unused scale window_size_left window_size_right",
    "_foreach_mul_.Scalar": "self scalar",
    "_foreach_norm.Scalar": "self",
    "_fused_adamw_": "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 "
    "weight_decay eps amsgrad maximize",
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp "
    "dropout_p is_causal attn_mask scale",
}
# As old as `seqused_k` are a log-sum-exp of (heads, tokens), and a cache for the graph that cuDNN makes of a
# call in 40 ms. Before, torch made one for every call.
CUDNN = {
    "_cudnn_attention_forward": "query key value attn_bias cum_seq_q cum_seq_k max_q max_k "
    "compute_log_sumexp dropout_p is_causal return_debug_mask scale seqused_k",
    "_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset "
    "attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}

check(PRIVATE)
NO_CUDNN = difference(CUDNN)
aten = torch.ops.aten
on_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
on_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_kernel = aten._flash_attention_forward.default
flash_kernel_backward = aten._flash_attention_backward.default
cudnn_kernel = aten._cudnn_attention_forward.default
cudnn_kernel_backward = aten._cudnn_attention_backward.default


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
        """(segments + 1,) int32 for queries and keys; the same tensor if the lengths are the same."""
        queries = on_device(_bounds(self.query_lengths), self.device)
        if np.array_equal(self.query_lengths, self.key_lengths):
            return queries, queries
        return queries, on_device(_bounds(self.key_lengths), self.device)

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def is_plain(self) -> bool:
        """Whether all see all, or as many keys as queries none later."""
        queries, keys = self.bounds
        return self.left is None and (self.right is None or (self.is_causal and queries is keys))

    @cached_property
    def longest(self) -> tuple[int, int]:
        return int(self.query_lengths.max(initial=0)), int(self.key_lengths.max(initial=0))

    @property
    def limits(self) -> tuple[int, int]:
        """Powers of two that `longest` do not exceed."""
        return limits(self.longest)

    @cached_property
    def is_even(self) -> bool:
        """See `even`."""
        tokens = int(self.query_lengths.sum()), int(self.key_lengths.sum())
        return even(len(self.query_lengths), self.limits, tokens)


def limits(longest: Sequence[int]) -> tuple[int, int]:
    return tuple(max(256, 1 << (length - 1).bit_length()) for length in longest)


def even(segments: int, limits: tuple[int, int], tokens: tuple[int, int]) -> bool:
    """Whether all segments, were they as long as `limits`, had at most twice the queries and keys."""
    return all(segments * limit <= 2 * number for limit, number in zip(limits, tokens, strict=True))


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], lengths)).cumsum().astype(np.int32)


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


def documents_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, attend: Callable = on_cpu
) -> Outputs:
    """The kernel in plain PyTorch: its flash attention for CPUs, one call for each segment or part of one."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    contexts, log_sums = [], []
    for part in _parts(segments, query, attend is on_cpu):
        q, k, v = query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys]
        context, log_sum = attend(q, k, v, 0.0, part.causal, attn_mask=part.mask, scale=scale)
        contexts.append(context[0].transpose(0, 1))
        log_sums.append(log_sum[0])
    return torch.cat(contexts), torch.cat(log_sums, dim=1)


def documents_backward(
    gradient: Tensor,
    inputs: Inputs,
    outputs: Outputs,
    segments: Segments,
    scale: float,
    attend=on_cpu_backward,
) -> Inputs:
    """See the module."""
    context, log_sum_exp = outputs
    gradient, query, key, value, context = (x.transpose(0, 1)[None] for x in (gradient, *inputs, context))
    is_whole = attend is on_cpu_backward
    sums = None if is_whole else torch.promote_types(key.dtype, torch.float32)  # of many parts
    totals = torch.empty_like(query), torch.zeros_like(key, dtype=sums), torch.zeros_like(value, dtype=sums)
    for part in _parts(segments, query, is_whole):
        q, k, v = query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys]
        dc = gradient[:, :, part.queries]
        c = context[:, :, part.queries]
        log_sum = log_sum_exp[None, :, part.queries]
        grads = attend(dc, q, k, v, c, log_sum, 0.0, part.causal, attn_mask=part.mask, scale=scale)
        totals[0][:, :, part.queries] = grads[0]
        for total, grad in zip(totals[1:], grads[1:], strict=True):
            total[:, :, part.keys] += grad
    return tuple(x[0].transpose(0, 1).to(query.dtype) for x in totals)


def products_forward(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, attn_mask: Tensor | None, scale: float
) -> Outputs:
    """Attend as `on_cpu` does, by products of matrices: on any device, for heads of any width.

    Scores and the softmax are in fp32, and in memory for `QUERIES_AT_ONCE` queries at a time.
    """
    _, scores = _scores(query, key, attn_mask, scale)
    log_sum = scores.logsumexp(-1)
    context = scores.sub_(log_sum[..., None]).exp_().to(value.dtype) @ value[0]
    return context.reshape(query.shape), log_sum.reshape(query.shape[:-1])


def products_backward(gradient: Tensor, *tensors: Any, attn_mask: Tensor | None, scale: float) -> Inputs:
    """See `products_forward`, and FlashAttention 2 (arXiv 2307.08691), algorithm 2."""
    query, key, value, context, log_sum, *_ = tensors
    rows, scores = _scores(query, key, attn_mask, scale)
    shares = scores.sub_(log_sum.reshape(scores.shape[:-1])[..., None]).exp_()
    gradient_rows = gradient.reshape(rows.shape)
    grad_value = _wide(shares.to(rows.dtype).mT, gradient_rows)
    inner = (gradient_rows.to(scores.dtype) * context.reshape(rows.shape)).sum(-1, keepdim=True)
    grad_scores = shares.mul_(_wide(gradient_rows, value[0].mT).sub_(inner).mul_(scale)).to(rows.dtype)
    grad_query = (grad_scores @ key[0]).reshape(query.shape)
    return grad_query, _wide(grad_scores.mT, rows)[None], grad_value[None]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The queries of all heads that share keys as rows (heads of keys, rows, K), and scores in fp32."""
    rows = query.reshape(key.shape[1], -1, query.shape[-1])
    scores = _wide(rows, key[0].mT).mul_(scale)
    if mask is not None:
        scores.unflatten(1, (-1, query.shape[2])).add_(mask)
    return rows, scores


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """The product in fp32 or wider, which torch has on CUDA alone for operands in 16 bits."""
    wider = torch.promote_types(a.dtype, torch.float32)
    is_wide = a.dtype == wider or a.device.type == "cpu"
    return a.to(wider) @ b.to(wider) if is_wide else torch.bmm(a, b, out_dtype=wider)


def _parts(segments: Segments, scores_like: Tensor, may_be_whole: bool) -> Iterator[Part]:
    """Whole segments where no mask is needed, else runs of their queries with the keys that they see."""
    first_query = first_key = 0
    keys_before, keys_after = segments.left, segments.right
    for n, m in zip(segments.query_lengths.tolist(), segments.key_lengths.tolist(), strict=True):
        unlimited = keys_before is None or keys_before >= m - 1
        is_plain = unlimited and (keys_after is None or (keys_after == 0 and n == m and may_be_whole))
        at_once = max(n, 1) if is_plain and may_be_whole else QUERIES_AT_ONCE
        for start in range(0, max(n, 1), at_once):
            stop = min(start + at_once, n)
            # query i is aligned with key i + m - n
            low = 0 if keys_before is None else max(0, start + m - n - keys_before)
            high = m if keys_after is None else min(m, stop + m - n + keys_after)
            queries = slice(first_query + start, first_query + stop)
            keys = slice(first_key + low, first_key + high)
            mask = None
            if not is_plain:
                query_of = torch.arange(start + m - n, stop + m - n, device=scores_like.device)
                distance = torch.arange(low, high, device=scores_like.device) - query_of[:, None]
                mask = torch.zeros_like(distance, dtype=scores_like.dtype)
                if keys_before is not None:
                    mask.masked_fill_(distance < -keys_before, -torch.inf)
                if keys_after is not None:
                    mask.masked_fill_(distance > keys_after, -torch.inf)
            yield Part(queries, keys, is_plain and keys_after == 0, mask)
        first_query += n
        first_key += m


def flash_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Outputs:
    """FlashAttention 2 in torch, for CUDA, in 16 bits."""
    outputs = flash_kernel(
        *(query, key, value, *segments.bounds, *segments.longest, 0.0, segments.is_causal, False),
        **_options(segments, scale),
    )
    return outputs[0], outputs[1]


def flash_backward(
    gradient: Tensor, inputs: Inputs, outputs: Outputs, segments: Segments, scale: float
) -> Inputs:
    """See the module. There is no dropout, so the state of its generator is of no use."""
    state = torch.empty(2, dtype=torch.uint64, device=gradient.device)
    unused = torch.empty(0, device=gradient.device)
    return flash_kernel_backward(
        *(gradient.contiguous(), *inputs, *outputs, *segments.bounds, *segments.longest),
        *(0.0, segments.is_causal, state, unused),
        **_options(segments, scale),
    )


def _options(segments: Segments, scale: float) -> dict[str, Any]:
    window = {"window_size_left": segments.left, "window_size_right": segments.right}
    return {"scale": scale} | {side: -1 if limit is None else limit for side, limit in window.items()}


def flash_workspace(query: Sequence[int], key: Sequence[int], segments: int) -> int:
    """Return the bytes that FlashAttention 2's backward pass holds besides what it gets and gives.

    These are the query's gradient and a sum in fp32, with 128 rows more for each segment. Where query heads
    share keys, each has gradients of keys and values besides (`mha_varlen_bwd` in torch 2.11 and 2.15).

    Args:
        query: The shape (tokens, heads, K).
        key: The shape (tokens, heads, K).
        segments: Their number.
    """
    tokens, heads, width = query
    padded_width = -(-width // 32) * 32 if width <= 192 else 256
    shared = 4 * key[0] * heads * width if key[1] != heads else 0
    return (tokens + 128 * segments) * heads * (4 * padded_width + 4) + shared


def cudnn_workspace(query: Sequence[int], key: Sequence[int], segments: int, limits: tuple[int, int]) -> int:
    """Return what `flash_workspace` does, for cuDNN.

    It has rows for `limits` queries and keys in every segment: cudnn-frontend's backward node would need the
    number of all tokens, which torch 2.15 does not hand on.
    """
    _, heads, width = query
    shared = 4 * limits[1] * heads * width if key[1] != heads else 0
    return segments * (limits[0] * heads * (4 * width + 4) + shared)


def most_workspace(query: Sequence[int], key: Sequence[int], segments: int, longest: Sequence[int]) -> int:
    """Return the most bytes that a kernel needs which may take such a call."""
    by_flash = flash_workspace(query, key, segments)
    if not even(segments, limits(longest), (query[0], key[0])):
        return by_flash
    return max(by_flash, cudnn_workspace(query, key, segments, limits(longest)))


def cudnn_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Outputs:
    """cuDNN's attention through torch, for CUDA, in 16 bits.

    Windows, unknown to it, go to `flash_forward`, and so do uneven segments (`cudnn_workspace`). cuDNN plans
    a call for its number of tokens, the longest segment and strides, so these are rounded or always the same.
    """
    if NO_CUDNN:
        raise NotImplementedError(NO_CUDNN)
    if not (segments.is_plain and segments.is_even):
        return flash_forward(query, key, value, segments, scale)
    outputs = cudnn_kernel(
        *(_rounded(query), _rounded(key), _rounded(value), None, *segments.bounds, *segments.limits),
        *(True, 0.0, segments.is_causal, False),
        scale=scale,
    )
    return outputs[0][: len(query)], outputs[1][:, : len(query)].contiguous()


def cudnn_backward(
    gradient: Tensor, inputs: Inputs, outputs: Outputs, segments: Segments, scale: float
) -> Inputs:
    """See the module and `cudnn_forward`."""
    if not (segments.is_plain and segments.is_even):
        return flash_backward(gradient, inputs, outputs, segments, scale)
    gradient, query, key, value, context = map(_rounded, (gradient, *inputs, outputs[0]))
    log_sum_exp = pad(outputs[1], (0, len(query) - len(inputs[0])))
    state = torch.empty(2, dtype=torch.uint64, device=gradient.device)
    grads = cudnn_kernel_backward(
        *(gradient, query, key, value, context, log_sum_exp, state, state, None),
        *(*segments.bounds, *segments.limits, 0.0, segments.is_causal),
        scale=scale,
    )
    return tuple(grad[: len(x)] for grad, x in zip(grads, inputs, strict=True))


def _rounded(x: Tensor) -> Tensor:
    """Without gaps, with more rows, at most an eighth, which no segment has."""
    step = 1 << max(7, len(x).bit_length() - 4)
    return pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % step)) if len(x) % step else x.contiguous()


def flash4_is_installed() -> bool:
    """Whether the package flash-attn-4 is there; others put modules of the same name elsewhere."""
    return any(metadata.distributions(name="flash-attn-4"))


def _flash4(name: str, tensors: Iterable[Tensor], segments: Segments, scale: float, **options: Any) -> Any:
    """Call a function of FlashAttention 4 (read in 4.0.0b36), for CUDA, in 16 bits.

    torch's `activate_flash_attention_impl("FA4")` calls the same two, but in the place of FlashAttention 2,
    for all of a process. Their errors of many types become RuntimeErrors.
    """
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), segments.bounds, strict=True))
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), segments.longest, strict=True))
    window = {"window_size_left": segments.left, "window_size_right": segments.right}
    try:
        function = getattr(import_module("flash_attn.cute.interface"), name)
        return function(*tensors, softmax_scale=scale, **bounds, **longest, **window, **options)
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"flash-attn-4: {type(error).__name__}: {error}") from error


def flash4_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Outputs:
    """See the module."""
    return _flash4("_flash_attn_fwd", (query, key, value), segments, scale, return_lse=True)[:2]


def flash4_backward(
    gradient: Tensor, inputs: Inputs, outputs: Outputs, segments: Segments, scale: float
) -> Inputs:
    """See the module. It holds what `flash_workspace` says or less, and 4 bytes for each query and head."""
    tensors = *inputs, outputs[0], gradient.contiguous(), outputs[1]
    is_fixed = torch.are_deterministic_algorithms_enabled()
    return _flash4("_flash_attn_bwd", tensors, segments, scale, deterministic=is_fixed)[:3]


KERNELS = {
    "documents": Kernel(documents_forward, documents_backward),
    "products": Kernel(
        partial(documents_forward, attend=products_forward),
        partial(documents_backward, attend=products_backward),
    ),
    "flash": Kernel(flash_forward, flash_backward),
    "cudnn": Kernel(cudnn_forward, cudnn_backward),
    "flash4": Kernel(flash4_forward, flash4_backward),
}
