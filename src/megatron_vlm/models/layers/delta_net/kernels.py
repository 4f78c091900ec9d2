"""The convolution and the rule of gated delta nets: by flash-linear-attention's kernels where a check before
the run took them, else in plain PyTorch. Both take the documents of a stream in one call.

The kernels are for CUDA and 16 bits, and have not run on a GPU yet. They get the chunks of documents beside
their bounds: else they would count them on the device, and the host would wait for it.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vlm.models.layers.delta_net.plan import Documents
from megatron_vlm.models.layers.delta_net.rule import DeltaRule, Recomputed, convolved

CONVOLVED_AT_ONCE = 2**26  # numbers that are convolved at once in PyTorch


class Kernels(NamedTuple):
    """The package's functions, or others with their signatures."""

    rule: Callable  # fla.ops.gated_delta_rule.chunk_gated_delta_rule
    convolution: Callable  # fla.modules.convolution.causal_conv1d


used: Kernels | None = None  # by all gated delta nets of this process


def installed() -> Kernels | None:
    """The package's kernels; None if it is not installed. Its import takes seconds and asks for the card."""
    if find_spec("fla") is None:
        return None
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Kernels(chunk_gated_delta_rule, causal_conv1d)


def convolution(x_TC: Tensor, weight_CW: Tensor, documents: Documents, by: Kernels | None) -> Tensor:
    """`rule.convolved` over documents. In PyTorch, which takes several tensors in fp32, long streams are
    convolved some channels after the other."""
    if by is None or not len(x_TC):
        at_once = max(1, CONVOLVED_AT_ONCE // max(1, len(x_TC)))
        slabs = zip(x_TC.split(at_once, 1), weight_CW.split(at_once), strict=True)
        parts = [Recomputed.apply(convolved, x, weight, documents.place) for x, weight in slabs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    stream = {"cu_seqlens": documents.bounds, "chunk_indices": documents.chunks}
    return by.convolution(x_TC[None], weight_CW, activation="silu", **stream)[0][0]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Documents,
    by: Kernels | None,
) -> Tensor:
    """`rule.DeltaRule` over documents. The package counts heads of values, as they lie here: all that share a
    head of keys, then the next."""
    if by is None or not len(value):
        return DeltaRule.apply(query, key, value, decay, beta, documents.number)
    outputs, _ = by.rule(
        query[None],
        key[None],
        value.flatten(1, 2)[None],
        decay.flatten(1, 2)[None],
        beta.flatten(1, 2)[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=documents.bounds,
        chunk_indices=documents.chunks,
    )
    return outputs[0].view(value.shape)
