"""What is compiled, and gradients that their product adds, against the same as written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from gpu_check.clock import seconds
from gpu_check.rows import Row
from gpu_check.sizes import DTYPE, ON_CUDA, About, Sizes
from megatron_vlm.models.family_parts.towers import tower_of_class
from megatron_vlm.models.layers.fused import compiled_on
from megatron_vlm.models.layers.fused_towers import fused_tower_cases
from megatron_vlm.models.layers.kernel_checks import (
    fused_cases,
    fused_disagreement,
    tower_disagreement,
    weight_gradient_disagreement,
)
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.linears import wgrad_gemm_accum_fp32


def models(sizes: Sizes) -> dict[str, SimpleNamespace]:
    """The settings of a SwiGLU model like Qwen3 and of a GeGLU model like Gemma 3."""
    common = {
        "hidden_size": sizes.fused_width,
        "ffn_hidden_size": 3 * sizes.fused_width,
        "tensor_model_parallel_size": 1,
        "num_moe_experts": 8,
        "layernorm_epsilon": 1e-6,
        "rotary_interleaved": False,
        "qk_layernorm": True,
        "attention_output_gate": False,
        "latent_heads": None,
        "layer_heads": (),
        "params_dtype": DTYPE,
    }
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    swiglu = {"activation_func": torch.nn.functional.silu, "layernorm_zero_centered_gamma": False}
    geglu = {"activation_func": gelu, "layernorm_zero_centered_gamma": True}
    return {
        "SwiGLU": SimpleNamespace(**common, **swiglu, kv_channels=128),
        "GeGLU": SimpleNamespace(**common, **geglu, kv_channels=256),
    }


def tower() -> nn.Module:
    """One layer of the tower of Qwen2.5-VL, which has all of a tower's functions, without weights."""
    config = Qwen2_5_VLVisionConfig(depth=1, hidden_size=1280, intermediate_size=3420, num_heads=16)
    with torch.device("meta"):
        return tower_of_class(Qwen2_5_VisionTransformerPretrainedModel, config)


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    device = setup.device()
    for model, config in models(sizes).items():
        problem = fused_disagreement(config, device)
        yield judged(f"norm, rotary embedding, gates, {model}, compiled against written", problem)
    problem = tower_disagreement(tower(), device, DTYPE)
    yield judged("norm, rotary embedding, gates of a tower, compiled against written", problem)
    for dtype in (torch.bfloat16, torch.float32):
        problem = weight_gradient_disagreement(device, dtype)
        yield judged(f"gradients of weights added by their product, {dtype}", problem)
    for model, config in models(sizes).items():
        for name, case in fused_cases(config, sizes.fused_tokens, device).items():
            times = seconds_of_case(sizes, None, *case) / seconds_of_case(sizes, "cuda", *case)
            yield Row("fused", f"{name}, {model}, written over compiled, times", times)
    random = partial(torch.randn, device=device, dtype=DTYPE)
    for name, case in fused_tower_cases(tower(), sizes.patches, random).items():
        times = seconds_of_case(sizes, None, *case) / seconds_of_case(sizes, "cuda", *case)
        yield Row("fused", f"{name}, written over compiled, times", times)
    yield speed_of_weight_gradients(sizes)


def judged(what: str, problem: str | None) -> Row:
    return Row("fused", f"{what}: {problem}" if problem else what, float(problem is not None), 0)


def seconds_of_case(sizes: Sizes, device_type: str | None, function, given: list[torch.Tensor]) -> float:
    *inputs, gradient = (x.detach().requires_grad_() for x in given)
    with compiled_on(device_type):
        return seconds(lambda: torch.autograd.grad(function(*inputs), inputs, gradient), sizes.rounds)


def speed_of_weight_gradients(sizes: Sizes) -> Row:
    """The gradient of a feed-forward's first weight, over as many tokens as the functions above."""
    device, width = setup.device(), sizes.fused_width
    x, grad = (torch.randn(sizes.fused_tokens, n, device=device, dtype=DTYPE) for n in (width, 6 * width))
    total = torch.zeros(6 * width, width, device=device)
    made = seconds(lambda: total.add_(grad.t() @ x), sizes.rounds)
    times = made / seconds(lambda: wgrad_gemm_accum_fp32(x, grad, total), sizes.rounds)
    on = "" if ON_CUDA else " on a CPU"
    return Row("fused", f"gradient of a weight{on}, made first over added by its product, times", times)
