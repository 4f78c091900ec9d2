"""Functions with the signatures of flash-linear-attention for a CPU: plain PyTorch, each document alone.

They read the documents out of the bounds and the chunks that they get, as the kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vlm.models.layers.delta_net import Kernels
from megatron_vlm.models.layers.delta_rule import CHUNK, DeltaRule, Recomputed, convolved


def chunk_gated_delta_rule(
    q: Tensor,  # (1, T, H, K)
    k: Tensor,
    v: Tensor,  # (1, T, HV, V)
    g: Tensor,  # (1, T, HV)
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, None]:
    assert scale is None and initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
    heads = q.shape[2], v.shape[2] // q.shape[2]
    inputs = q[0], k[0], *(x[0].unflatten(1, heads) for x in (v, g, beta))
    outputs = []
    for tokens in _documents(cu_seqlens, chunk_indices):
        part = [x[tokens] for x in inputs]
        outputs.append(DeltaRule.apply(*part, torch.zeros(len(part[0]), dtype=torch.int32)))
    return torch.cat(outputs).flatten(1, 2)[None], None


def causal_conv1d(
    x: Tensor,  # (1, T, D)
    weight: Tensor,  # (D, W)
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, None]:
    assert bias is residual is initial_state is None and not output_final_state and activation == "silu"
    parts = [x[0, tokens] for tokens in _documents(cu_seqlens, chunk_indices)]
    each = [Recomputed.apply(convolved, part, weight, torch.arange(len(part))) for part in parts]
    return torch.cat(each)[None], None


def _documents(cu_seqlens: Tensor, chunk_indices: Tensor) -> list[slice]:
    """Where the documents' tokens are: a document's chunks are there in order and hold all of its tokens."""
    bounds = cu_seqlens.tolist()
    documents = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    counts = [-(-(each.stop - each.start) // CHUNK) for each in documents]
    assert chunk_indices.tolist() == [[d, c] for d, count in enumerate(counts) for c in range(count)]
    return documents


STAND_IN = Kernels(chunk_gated_delta_rule, causal_conv1d)
