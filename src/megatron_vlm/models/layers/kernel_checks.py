"""A look at kernels before a run relies on them: on a few hundred tokens they agree with the reference."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from typing import NamedTuple

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
    for channels, groups in sorted(set(heads_of_layers)):
        pairs = zip(windows, heads_of_layers, strict=True)
        windows_of_these = {window for window, heads in pairs if heads == (channels, groups)}
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
    given = _random(sizes, device, dtype)
    for window in windows:
        if problem := _compare(name, given, plan, plan.views[window], plan.views[window]):
            return f"{problem} in layers of window {window}"
    return None


def tower_disagreement(number: int, width: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for a tower's attention, in which all patches of a segment see each other."""
    whole = [(number, 0, length) for number, length in enumerate(DOCUMENTS)]
    plan = AttentionPlan(Placement(DOCUMENTS, whole, 1), 0, sum(DOCUMENTS), {None}, device)
    given, view = _random((number, number, width), device, dtype), view_of(np.array(DOCUMENTS), device)
    return _compare(backend(device), given, plan, view, plan.views[None])


def _random(sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the context."""
    made = torch.Generator(device).manual_seed(0)
    (queries, keys, width), tokens = sizes, sum(DOCUMENTS)
    return [
        torch.randn(tokens, n, width, generator=made, device=device).to(dtype)
        for n in (queries, keys, keys, queries)
    ]


def _compare(name: str, given: list[Tensor], plan: AttentionPlan, view: View, seen: View) -> str | None:
    """The backend on `view`, against dense attention in fp32 with the mask of `seen`."""
    scale = given[0].shape[-1] ** -0.5
    try:
        found = _with_gradients(given, lambda *x: Attend.apply(*x, view, KERNELS[name], scale))
    except (RuntimeError, NotImplementedError) as error:
        return f"{name} does not run here ({str(error).splitlines()[0]})"
    expected = _with_gradients([x.float() for x in given], lambda *x: dense(*x, plan, seen, scale))
    for what, error in zip(("context", "dq", "dk", "dv"), _differences(found, expected), strict=True):
        if not error <= LARGEST[given[0].dtype]:
            return f"{name} has a {what} that differs by {error:.1e}"
    return None


def _with_gradients(given: list[Tensor], function: Callable[..., Tensor]) -> list[Tensor]:
    *inputs, gradient = given
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def _differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest of each pair, of the largest number expected."""
    pairs = zip(found, expected, strict=True)
    return [((ours.float() - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs]


# --- norms, rotary embeddings and gates -------------------------------------------------------------------


def check_fused(megatron_config: TransformerConfig, device: torch.device) -> None:
    """Has `fused` functions run as they are written, with a warning, if compiled ones do not agree with that.

    A run then compiles nothing but for further layouts of tensors. It has not run on a GPU yet.
    """
    sizes = FusedSizes(
        megatron_config.hidden_size,
        megatron_config.kv_channels,
        megatron_config.ffn_hidden_size // megatron_config.tensor_model_parallel_size,
        megatron_config.activation_func,
        megatron_config.layernorm_zero_centered_gamma,
    )
    if problem := fused_disagreement(sizes, device, megatron_config.params_dtype):
        warnings.warn(
            f"norms, rotary embeddings and gates: {problem}. They run as they are written: slower, with the "
            "same results and no more memory kept for the backward pass.",
            stacklevel=2,
        )
        Fused.compiles_on = None


class FusedSizes(NamedTuple):
    """Channels of hidden states, of a head and of the feed-forward, and a model's kinds of functions."""

    width: int
    head: int
    ffn: int
    activation: Callable[[Tensor], Tensor]
    zero_centered: bool


def fused_disagreement(sizes: FusedSizes, device: torch.device, dtype: torch.dtype) -> str | None:
    """Says to the user what is wrong with the compiled functions on this device; None if nothing is."""
    for tokens in (512, 37):  # what is compiled for one length serves others
        try:
            errors = fused_errors(sizes, tokens, device, dtype)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            return f"torch.compile fails here ({' '.join(str(error).split())[:300]})"
        for name, error in errors.items():
            if not error <= LARGEST[dtype]:
                return f"{name}, compiled, differs by {error:.1e} for {tokens} tokens"
    return None


def fused_errors(
    sizes: FusedSizes, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """The largest difference of each function's result and gradients from the written one in fp32."""
    errors = {}
    for name, (function, given) in fused_cases(sizes, tokens, device, dtype).items():
        found = _with_gradients(given, function)
        with compiled_on(None):
            expected = _with_gradients([x.float() for x in given], function)
        errors[name] = max(_differences(found, expected))
    return errors


def fused_cases(
    sizes: FusedSizes, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of tensors by name, with random ones for it; the last is the gradient of its result."""
    made = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=device).to(dtype)

    width, head, ffn, activation, zero_centered = sizes
    angles = random(tokens, 1, 1, head // 4)
    turn, turn_neighbours = (of_channels(angles.cos(), angles.sin(), adjacent) for adjacent in (False, True))
    cases: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
        "norm": (
            lambda x, weight: Norm.apply(x, weight, 1e-6, zero_centered),
            [(tokens, 1, width), (width,), (tokens, 1, width)],
        ),
        "rotary embedding": (lambda x: rotate(x, *turn), [(tokens, 1, 4, head)] * 2),
        "rotary embedding of neighbours": (
            lambda x: rotate(x, *turn_neighbours, adjacent=True),
            [(tokens, 1, 4, head)] * 2,
        ),
        "gate": (lambda x: gated(x, activation), [(tokens, 1, 2 * ffn), (tokens, 1, ffn)]),
        "gate with weights": (
            lambda x, weights: gated(x, activation, weights),
            [(tokens, 2 * ffn), (tokens,), (tokens, ffn)],
        ),
    }
    return {name: (function, [random(*shape) for shape in of]) for name, (function, of) in cases.items()}


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
    made = torch.Generator(device).manual_seed(0)
    inputs, grads = (
        [torch.randn(300, width, generator=made, device=device).to(dtype) for _ in range(2)]
        for width in (64, 96)
    )
    found = torch.zeros(96, 64, device=device)
    try:
        for x, grad in zip(inputs, grads, strict=True):
            wgrad_gemm_accum_fp32(x, grad, found)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"torch has no product that adds here ({str(error).splitlines()[0]})"
    expected = sum(grad.t().double() @ x.double() for x, grad in zip(inputs, grads, strict=True))
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    return None if error <= LARGEST[torch.float32] else f"they differ by {error:.1e}"
