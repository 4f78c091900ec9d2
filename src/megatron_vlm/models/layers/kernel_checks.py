"""A look at kernels before a run relies on them: on a few hundred tokens they agree with the reference."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.config import ModelConfig
from megatron_vlm.models.layers.attention import Attend, dense
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement, View
from megatron_vlm.models.layers.feed_forward import gated
from megatron_vlm.models.layers.fused import Fused, Norm, compiled_on, of_channels, rotate
from megatron_vlm.models.layers.kernels import KERNELS
from megatron_vlm.models.layers.tower_attention import backend, heads, use_sdpa, view_of
from megatron_vlm.parallel.weight_gradients import wgrad_gemm_accum_fp32

LARGEST = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # difference allowed, of the largest number
DOCUMENTS, BLOCKS = [300, 1, 211], [(0, 20, 150), (2, 200, 211)]


def attention_backends(
    megatron_config: TransformerConfig, model: ModelConfig, device: torch.device
) -> dict[int, str]:
    """The backend of `models.layers.attention` by the channels of a layer's heads: what `model.attention`
    means on this device; dense, with a warning, where a kernel for CUDA does not agree with that."""
    tp = megatron_config.tensor_model_parallel_size
    windows = megatron_config.layer_windows or (None,) * megatron_config.num_layers
    heads_of_all = (megatron_config.kv_channels, megatron_config.num_query_groups)
    heads_of_layers = [heads[:2] for heads in megatron_config.layer_heads] or [heads_of_all] * len(windows)
    backend = model.attention
    if backend == "auto":
        on_cuda = "varlen" if model.dtype == "bf16" else "dense"  # the kernels are for 16 bits
        backend = on_cuda if device.type == "cuda" else "documents"
    backends = {channels: backend for channels, _ in heads_of_layers}
    if device.type != "cuda" or backend == "dense":
        return backends
    windows_of_heads: dict[tuple[int, int], set[int | None]] = {}
    for window, heads_of_layer in zip(windows, heads_of_layers, strict=True):
        windows_of_heads.setdefault(heads_of_layer, set()).add(window)
    for (channels, groups), windows_of_these in windows_of_heads.items():
        sizes = (megatron_config.num_attention_heads // tp, groups // tp, channels)
        problem = disagreement(backend, sizes, windows_of_these, device, megatron_config.params_dtype)
        if problem is not None:
            warnings.warn(
                f"model.attention: {problem} with heads of {channels}. Dense attention takes its place: "
                "slow, with memory that grows as the square of a row.",
                stacklevel=2,
            )
            backends[channels] = "dense"
    return backends


def check_towers(vision: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives towers Transformers' own attention, with a warning, if theirs does not agree with dense.

    In fp32 on CUDA, for which there is no kernel, without a warning.
    """
    if device.type == "cuda" and dtype == torch.float32:
        return use_sdpa(vision)
    for number, width in heads(vision):
        if problem := tower_disagreement(number, width, device, dtype):
            warnings.warn(
                f"vision tower: {problem}. Transformers' own attention takes its place, with one call for "
                "each image or a mask of all pairs of patches: slower.",
                stacklevel=2,
            )
            return use_sdpa(vision)


def disagreement(
    name: str,
    sizes: tuple[int, int, int],
    windows: set[int | None],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Says to the user what is wrong with the backend on this device; None if nothing is.

    `sizes` are the numbers of query heads, of key heads and of channels. Context and gradients are compared
    with the dense backend's in fp32 on the same numbers, for every window and image blocks.
    """
    plan = AttentionPlan(Placement(DOCUMENTS, BLOCKS, 1), 0, sum(DOCUMENTS), windows, device)
    for window in windows:
        if problem := _compare(name, sizes, dtype, plan, plan.views[window], plan.views[window]):
            return f"{problem} in layers of window {window}"
    return None


def tower_disagreement(number: int, width: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for a tower's attention, in which all patches of a segment see each other."""
    blocks = [(document, 0, length) for document, length in enumerate(DOCUMENTS)]
    plan = AttentionPlan(Placement(DOCUMENTS, blocks, 1), 0, sum(DOCUMENTS), {None}, device)
    view = view_of(np.array(DOCUMENTS), device)
    return _compare(backend(device), (number, number, width), dtype, plan, view, plan.views[None])


def _compare(
    name: str, sizes: tuple[int, int, int], dtype: torch.dtype, plan: AttentionPlan, view: View, seen: View
) -> str | None:
    """The backend on `view`, against dense attention in fp32 with the mask of `seen`."""
    queries, keys, width = sizes
    random, scale = _random(plan.device, dtype), width**-0.5
    # query, key, value and the gradient of the context
    tensors = [random(plan.length, heads, width) for heads in (queries, keys, keys, queries)]
    try:
        found = _with_gradients(tensors, lambda q, k, v: Attend.apply(q, k, v, view, KERNELS[name], scale))
    except (RuntimeError, NotImplementedError) as error:
        return f"{name} does not run here ({str(error).splitlines()[0]})"
    wide = [x.float() for x in tensors]
    expected = _with_gradients(wide, lambda q, k, v: dense(q, k, v, plan, seen, scale))
    for what, ours, theirs in zip(("context", "dq", "dk", "dv"), found, expected, strict=True):
        if not (error := _difference(ours, theirs)) <= LARGEST[dtype]:
            return f"{name} has a {what} that differs by {error:.1e}"
    return None


def _random(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of lengths that makes tensors, the same numbers at every start."""
    made = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=made, device=device).to(dtype)


def _with_gradients(tensors: list[Tensor], function: Callable[..., Tensor]) -> list[Tensor]:
    """The function's result and gradients; the last tensor is the gradient of its result."""
    *inputs, gradient = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, of the largest number expected."""
    return ((ours.float() - theirs).abs().max() / theirs.abs().max()).item()


# --- norms, rotary embeddings and gates -------------------------------------------------------------------


def check_fused(megatron_config: TransformerConfig, device: torch.device) -> None:
    """Has `fused` functions run as they are written, with a warning, if compiled ones do not agree with that.

    A run then compiles nothing but for further layouts of tensors. It has not run on a GPU yet.
    """
    if problem := fused_disagreement(megatron_config, device):
        warnings.warn(
            f"norms, rotary embeddings and gates: {problem}. They run as they are written: slower, with the "
            "same results and no more memory kept for the backward pass.",
            stacklevel=2,
        )
        Fused.compiles_on = None


def fused_disagreement(megatron_config: TransformerConfig, device: torch.device) -> str | None:
    """Says to the user what is wrong with the compiled functions on this device; None if nothing is."""
    for tokens in (512, 37):  # what is compiled for one length serves others
        for name, (function, tensors) in fused_cases(megatron_config, tokens, device).items():
            try:
                compiled = _with_gradients(tensors, function)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                return f"torch.compile fails here ({' '.join(str(error).split())[:300]})"
            with compiled_on(None):
                written = _with_gradients([x.float() for x in tensors], function)
            error = max(map(_difference, compiled, written))
            if not error <= LARGEST[megatron_config.params_dtype]:
                return f"{name}, compiled, differs by {error:.1e} for {tokens} tokens"
    return None


def fused_cases(
    megatron_config: TransformerConfig, tokens: int, device: torch.device
) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of tensors by name, with random ones for it; the last is the gradient of its result."""
    random = _random(device, megatron_config.params_dtype)
    width, head = megatron_config.hidden_size, megatron_config.kv_channels
    ffn = megatron_config.ffn_hidden_size // megatron_config.tensor_model_parallel_size
    activation = megatron_config.activation_func
    zero_centered = megatron_config.layernorm_zero_centered_gamma
    angles = random(tokens, 1, 1, head // 4)
    cases = {
        "norm": (
            lambda x, weight: Norm.apply(x, weight, 1e-6, zero_centered),
            [random(tokens, 1, width), random(width), random(tokens, 1, width)],
        ),
        "gate": (
            lambda x: gated(x, activation),
            [random(tokens, 1, 2 * ffn), random(tokens, 1, ffn)],
        ),
        "gate with weights": (
            lambda x, weights: gated(x, activation, weights),
            [random(tokens, 2 * ffn), random(tokens), random(tokens, ffn)],
        ),
    }
    for name, adjacent in (("rotary embedding", False), ("rotary embedding of neighbours", True)):
        cos, sin = of_channels(angles.cos(), angles.sin(), adjacent)
        cases[name] = (
            lambda x, cos=cos, sin=sin, adjacent=adjacent: rotate(x, cos, sin, adjacent),
            [random(tokens, 1, 4, head), random(tokens, 1, 4, head)],
        )
    return cases


# --- gradients of weights ---------------------------------------------------------------------------------


def check_weight_gradients(megatron_config: TransformerConfig, device: torch.device) -> None:
    """Turns off the product that adds gradients of weights itself, with a warning, if it is wrong here.
    Linears then make the gradients before adding them."""
    if problem := weight_gradient_disagreement(device, megatron_config.params_dtype):
        warnings.warn(
            f"gradients of weights: {problem}. They are made first and then added: slower.", stacklevel=2
        )
        megatron_config.gradient_accumulation_fusion = False


def weight_gradient_disagreement(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says to the user what is wrong with the sum of two micro batches' gradients on this device; None if
    nothing is. Products of two numbers of 16 bits are exact in fp32, so only the order of sums may differ."""
    random = _random(device, dtype)
    found, expected = torch.zeros(96, 64, device=device), 0
    for _ in range(2):
        x, grad = random(300, 64), random(300, 96)
        try:
            wgrad_gemm_accum_fp32(x, grad, found)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return f"torch has no product that adds here ({str(error).splitlines()[0]})"
        expected += grad.t().double() @ x.double()
    error = _difference(found, expected)
    return None if error <= LARGEST[torch.float32] else f"they differ by {error:.1e}"
