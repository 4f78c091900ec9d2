"""A look at the attention kernel before a run relies on it: on 512 tokens it agrees with the reference."""

from __future__ import annotations

import warnings

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vlm.models.layers.attention import Attend, dense
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement
from megatron_vlm.models.layers.kernels import KERNELS, Kernel

LARGEST = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # difference allowed, of the largest number
DOCUMENTS, BLOCKS = [300, 1, 211], [(0, 20, 150), (2, 200, 211)]


def check_attention(megatron_config: TransformerConfig, device: torch.device) -> None:
    """Changes the backend to dense, with a warning, if it does not agree with that on this device."""
    backend, tp = megatron_config.attention_backend_name, megatron_config.tensor_model_parallel_size
    if backend == "dense":
        return
    heads = (
        megatron_config.num_attention_heads // tp,
        megatron_config.num_query_groups // tp,
        megatron_config.kv_channels,
    )
    windows = set(megatron_config.layer_windows) or {None}
    if problem := disagreement(backend, heads, windows, device, megatron_config.params_dtype):
        warnings.warn(
            f"model.attention: {problem}. Dense attention takes its place: slow, with memory that grows as "
            "the square of a row.",
            stacklevel=2,
        )
        megatron_config.attention_backend_name = "dense"


def disagreement(
    backend: str,
    heads: tuple[int, int, int],
    windows: set[int | None],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """What is wrong with the backend on this device, for the user; None if nothing is.

    `heads` are the numbers of query heads, of key heads and of channels. Context and gradients are compared
    with the dense backend's in fp32 on the same numbers, for every window and image blocks.
    """
    plan = AttentionPlan(Placement(DOCUMENTS, BLOCKS, 1), 0, sum(DOCUMENTS), windows, device)
    made = torch.Generator(device).manual_seed(0)
    (queries, keys, width), tokens = heads, sum(DOCUMENTS)
    given = [
        torch.randn(tokens, n, width, generator=made, device=device).to(dtype)
        for n in (queries, keys, keys, queries)
    ]
    for window in windows:
        try:
            found = _context_and_gradients(given, plan, window, KERNELS[backend])
        except (RuntimeError, NotImplementedError) as error:
            return f"{backend} does not run here: {str(error).splitlines()[0]}"
        expected = _context_and_gradients([x.float() for x in given], plan, window, None)
        for name, ours, theirs in zip(("context", "dq", "dk", "dv"), found, expected, strict=True):
            error = ((ours.float() - theirs).abs().max() / theirs.abs().max()).item()
            if not error <= LARGEST[dtype]:
                return f"{backend} has a {name} that differs by {error:.1e} in layers of window {window}"
    return None


def _context_and_gradients(
    given: list[Tensor], plan: AttentionPlan, window: int | None, kernel: Kernel | None
) -> list[Tensor]:
    *inputs, gradient = given
    inputs = [x.clone().requires_grad_() for x in inputs]
    view, scale = plan.views[window], inputs[0].shape[-1] ** -0.5
    if kernel is None:
        context = dense(*inputs, plan, view, scale)
    else:
        context = Attend.apply(*inputs, view, kernel, scale)
    return [context.detach(), *torch.autograd.grad(context, inputs, gradient)]
