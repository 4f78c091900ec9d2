"""Rotary embeddings, RMS norms and gates of vision towers, as the language model's in `fused`.

Transformers runs these an operation at a time. Modules of a tower whose code is known get a `forward` of this
file, with the same results, less to keep, and compiled on CUDA. Its classes and functions stay as they are.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from megatron_vlm.models.layers.fused import DERIVATIVES, Activation, Fused, norm

VISION_ROTARY = "apply_rotary_pos_emb_vision"
ROTARY = {VISION_ROTARY, "apply_rotary_pos_emb"}  # names in an attention: in fp32; as Pixtral's
# the function of that name in Qwen's towers and in Pixtral
KNOWN_ROTARY = [apply_rotary_pos_emb_vision, apply_rotary_pos_emb]


def fuse_pointwise(tower: PreTrainedModel) -> None:
    """Let modules of known code call the functions of this file, with the same weights."""
    for module in tower.modules():
        forward = FORWARDS.get(_code(type(module).forward))
        if _has_known_rotary(type(module).forward):
            forward = _rotary_attention
        if forward and (not hasattr(module, "act_fn") or type(module.act_fn) in GATES):
            module.forward = partial(forward, module)


# --- rotary embeddings --------------------------------------------------------------------------------------


def _code(function: FunctionType) -> tuple[Any, ...]:
    """Return the operations of a function, whatever its variables are called."""
    code = function.__code__
    return code.co_code, code.co_names, code.co_consts


def _has_known_rotary(forward: FunctionType) -> bool:
    functions = [forward.__globals__.get(name) for name in ROTARY.intersection(forward.__code__.co_names)]
    return len(functions) == 1 and _code(functions[0]) in map(_code, KNOWN_ROTARY)


def _rotary_attention(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _with_fused_rotary(type(attention).forward)(attention, *args, **kwargs)


@cache
def _with_fused_rotary(forward: FunctionType) -> FunctionType:
    """A copy of an attention's `forward` that calls `rotate_both` in its rotary function's place."""
    [name] = ROTARY.intersection(forward.__code__.co_names)
    original = forward.__globals__[name]
    names = {**forward.__globals__, name: partial(rotate_both, original, fused_rotary(forward))}
    copy = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@cache
def fused_rotary(forward: FunctionType) -> Fused:
    """The rotary function of an attention's `forward`, for heads (P, H, K)."""
    [name] = ROTARY.intersection(forward.__code__.co_names)
    function = forward.__globals__[name]
    return Fused(function if name == VISION_ROTARY else lambda *args: function(*args, unsqueeze_dim=1))


def rotate_both(
    original: Callable,
    function: Fused,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int | None = None,
) -> tuple[Tensor, ...]:
    """Rotate heads (P, H, K) or (1, P, H, K), or (1, H, P, K) if `unsqueeze_dim` is 0, by tables (P, K).

    Several rows, or a table for each, are left to the `original` function of Transformers.
    """
    if cos.dim() > 2 or (q.dim() > 3 and len(q) > 1):
        axis = {} if unsqueeze_dim is None else {"unsqueeze_dim": unsqueeze_dim}
        return original(q, k, cos, sin, **axis)
    heads = [x.flatten(0, -3) for x in (q, k)]  # the compiler would begin again for an axis of one
    if unsqueeze_dim is None:
        return tuple(x.view(q.shape) for x in RotateBoth.apply(heads[0], heads[1], cos, sin, function))
    heads = [x.transpose(0, 1) for x in heads]
    rotated = RotateBoth.apply(heads[0], heads[1], cos, sin, function)
    return tuple(x.transpose(0, 1).view(q.shape) for x in rotated)


class RotateBoth(torch.autograd.Function):
    """`rotate_both` for (P, H, K). Its backward pass needs the tables alone, and rotates back, as their two
    halves are equal."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, function: Fused):
        ctx.save_for_backward(cos, sin)
        ctx.function = function
        return function(q, k, cos, sin)

    @staticmethod
    def backward(ctx, of_q: Tensor, of_k: Tensor):
        cos, sin = ctx.saved_tensors
        return *ctx.function(of_q, of_k, cos, -sin), None, None, None


# --- norms and gates ----------------------------------------------------------------------------------------


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    return norm(x, module.weight, module.variance_epsilon, False)


def _gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp.down_proj(gate_by_two(mlp.gate_proj(x), mlp.up_proj(x), GATES[type(mlp.act_fn)]))


def _quick_gelu(_: nn.Module, x: Tensor) -> Tensor:
    return gate_by_two(x, x, QUICK)


def gate_by_two(gate: Tensor, up: Tensor, functions: tuple[Activation, Callable]) -> Tensor:
    """Return activation(gate) * up, (..., I), from the activation and its derivative."""
    return GateByTwo.apply(gate.flatten(0, -2), up.flatten(0, -2), functions).view(gate.shape)


class GateByTwo(torch.autograd.Function):
    """`gate_by_two`. Its backward pass needs its inputs alone and computes the activation again."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, functions: tuple[Activation, Callable]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.functions = functions
        return gate_rows(gate, up, functions[0])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return *gate_rows_backward(gradient, *ctx.saved_tensors, *ctx.functions), None


@Fused
def gate_rows(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return activation(gate) * up


@Fused
def gate_rows_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: Activation, derivative: Callable
) -> tuple[Tensor, Tensor]:
    return derivative(gradient * up, gate), activation(gate) * gradient


def _quick(gate: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * gate)


def _quick_backward(of_active: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(of_active, _quick(gate)) * 1.702


QUICK = (_quick, _quick_backward)
GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])
GATES = {  # by Transformers' class of the activation
    type(ACT2FN["silu"]): (silu, DERIVATIVES[silu]),
    GELU_TANH: (partial(gelu, approximate="tanh"), DERIVATIVES[GELU_TANH.forward]),
}
SAME_CODE = (  # functions of Transformers, whatever their variables are called
    (LlamaRMSNorm.forward, _norm),
    (LlamaMLP.forward, _gated_mlp),
    (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), _gated_mlp),
    (type(ACT2FN["quick_gelu"]).forward, _quick_gelu),
)
FORWARDS = {_code(original): fused for original, fused in SAME_CODE}


# --- the check before a run ---------------------------------------------------------------------------------


FusedCase = tuple[Callable[..., Tensor], list[Tensor]]  # a function, its tensors, and its result's gradient


def fused_tower_cases(vision: nn.Module, tokens: int, random: Callable[..., Tensor]) -> dict[str, FusedCase]:
    """Return the functions that towers in `vision` call, by name, with random tensors for them."""
    modules = {getattr(vars(m).get("forward"), "func", None): m for m in vision.modules()}
    cases = {}
    if module := modules.get(_norm):
        width = len(module.weight)
        function = partial(norm, eps=module.variance_epsilon, zero_centered=False)
        cases["norm of a tower"] = function, [random(tokens, width), random(width), random(tokens, width)]
    if module := modules.get(_gated_mlp) or modules.get(_quick_gelu):
        function = partial(gate_by_two, functions=GATES.get(type(getattr(module, "act_fn", None)), QUICK))
        width = getattr(module, "intermediate_size", 4096)
        cases["gate of a tower"] = function, [random(tokens, width) for _ in range(3)]
    if module := modules.get(_rotary_attention):
        forward = type(module).forward
        angles = random(tokens, module.head_dim // 2).repeat(1, 2)
        angles = angles.float() if VISION_ROTARY in forward.__code__.co_names else angles
        number = getattr(module, "num_heads", None) or module.config.num_attention_heads
        heads = random(tokens, 2, number, module.head_dim)  # as they lie in one product
        cases["rotary embedding of a tower"] = (
            lambda q, k: torch.stack(
                RotateBoth.apply(q, k, angles.cos(), angles.sin(), fused_rotary(forward))
            ),
            [heads[:, 0], heads[:, 1], random(2, tokens, number, module.head_dim)],
        )
    return cases
