"""Norms, rotary embeddings and gated feed-forwards: CUDA runs their functions compiled, as one or two kernels
each, and other devices run them as they are written.

The callers of these functions are autograd functions with backward passes of their own: so what is kept
between the two passes does not depend on a compiler and is the same on every device, `meta` included.
Tests compile them for a CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, update_wrapper
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.utils.rnn import pad_sequence
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Fused:
    """Decorates a function whose first argument is a tensor of the device in question.

    It is compiled at its first call, once for all lengths. It rounds where the written one rounds.
    The compiler begins again for another number of axes, an axis of one, a view of what needs a gradient, and
    gaps, and gives up after eight. So callers join axes, it gets bare data, without gaps if that has at most
    two axes, and one row is not compiled.
    """

    compiles_on: str | None = "cuda"  # the type of the device, for all such functions

    def __init__(self, function: Callable[..., Any]):
        self.written = function
        update_wrapper(self, function)

    def __call__(self, first: Tensor, *arguments: Any) -> Any:
        if first.device.type != Fused.compiles_on or len(first) < 2:
            return self.written(first, *arguments)
        return self.compiled(*(_detach(x) if isinstance(x, Tensor) else x for x in (first, *arguments)))

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.written, dynamic=True, options={"emulate_precision_casts": True})


def _detach(x: Tensor) -> Tensor:
    """With two axes and gaps, which are closed, come keys, a small part of what is read."""
    return x.data if x.dim() > 2 else x.data.contiguous()


@contextmanager
def compiled_on(device_type: str | None) -> Iterator[None]:
    """Inside, devices of this type, if any, run what is compiled."""
    before, Fused.compiles_on = Fused.compiles_on, device_type
    try:
        yield
    finally:
        Fused.compiles_on = before


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type for statistics: fp32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def merge_leading_dims(x: Tensor) -> Tensor:
    """The same numbers, for the compiler with as few axes before the last as can be without a copy."""
    if x.device.type != Fused.compiles_on:
        return x
    for axis in range(x.dim() - 3, -1, -1):
        size, following = x.shape[axis : axis + 2]
        if 1 in (size, following) or x.stride(axis) == following * x.stride(axis + 1):
            x = x.flatten(axis, axis + 1)
    return x


# --- model.recompute=selective ------------------------------------------------------------------------------

CheapOutputs = dict[int, tuple[Tensor, Callable[[], Tensor]]]  # by the `_cdata` of their storage
_cheap: CheapOutputs | None = None  # None: nobody asks


@contextmanager
def cheap_outputs() -> Iterator[CheapOutputs]:
    """Collects what norms and gates put out inside, by storage, each with a function that makes it again."""
    global _cheap
    _cheap = {}
    try:
        yield _cheap
    finally:
        _cheap = None


def _offer(output: Tensor, function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """Returns `output`, and notes for `cheap_outputs` that `function(x, *arguments)` makes it again."""
    if _cheap is not None:
        again = partial(function, *(t.data if isinstance(t, Tensor) else t for t in (x, *arguments)))
        _cheap[output.untyped_storage()._cdata] = output.data, again
    return output


def make_again(cheap: CheapOutputs, output: Tensor) -> None:
    """Frees the cheap outputs of a layer, and makes them again when the gradient of its `output` is there.

    Megatron-Core's recompute_modules "layernorm" and "moe_act" do so for each output alone, and compile C++
    for it.
    """
    if not output.requires_grad:
        return
    for tensor, _ in cheap.values():
        tensor.untyped_storage().resize_(0)
        tensor.detach()  # an operation, by which a rehearsal sees the size

    def fill(gradient: Tensor) -> None:
        for tensor, again in cheap.values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            tensor.copy_(again().view_as(tensor))
        cheap.clear()

    output.register_hook(fill)


# --- norms --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, with statistics in fp32.

    With `layernorm_zero_centered_gamma` the weight is an offset from one and is applied in fp32 before the
    cast back, as one without offset with `wide_norms`; otherwise after the cast. Transformers does the same
    (Gemma3RMSNorm, Gemma4RMSNorm, LlamaRMSNorm). Sequence parallelism sums the weight's gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.wide = getattr(config, "wide_norms", False)
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps, self.zero_centered, self.wide)


class NormBefore(RMSNorm):
    """The norm before attention or a feed-forward, one of `cheap_outputs`."""

    def forward(self, x: Tensor) -> Tensor:
        return _offer(super().forward(x), _norm, x, self.weight, self.eps, self.zero_centered, self.wide)


class NormThenAdd(nn.Module):
    """residual + norm(sub-layer output), in place of Megatron's bias-dropout-add."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        return residual + self.norm(output if bias is None else output + bias)


def norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, in_fp32: bool = False) -> Tensor:
    """The norm of `RMSNorm`."""
    if not torch.is_grad_enabled():
        return _norm(x, weight, eps, zero_centered, in_fp32)
    return Norm.apply(x, weight, eps, zero_centered, in_fp32)


def _norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, in_fp32: bool) -> Tensor:
    return normed(merge_leading_dims(x), weight, eps, zero_centered, in_fp32)[0].view(x.shape)


class Norm(torch.autograd.Function):
    """`norm`. Its backward pass needs the input and 1 / root mean square (fp32)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, in_fp32: bool) -> Tensor:
        result, inverse_rms = normed(merge_leading_dims(x), weight, eps, zero_centered, in_fp32)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.zero_centered = zero_centered
        return result.view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight, inverse_rms = ctx.saved_tensors
        rows, trained = merge_leading_dims(x), ctx.needs_input_grad[1]
        gradient = gradient.reshape(rows.shape)
        of_rows, of_weight = _norm_backward(gradient, rows, weight, inverse_rms, ctx.zero_centered, trained)
        return of_rows.view(x.shape), of_weight, None, None, None


@Fused
def normed(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, in_fp32: bool
) -> tuple[Tensor, Tensor]:
    widened = x if x.dtype.itemsize >= 4 else x.float()
    squares = widened.square()
    inverse_rms = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
    result = torch.mul(widened, inverse_rms, out=squares)
    if not (zero_centered or in_fp32):
        return result.type_as(x).mul_(weight), inverse_rms
    scale = weight.type_as(result)
    return result.mul_(1.0 + scale if zero_centered else scale).type_as(x), inverse_rms


@Fused
def _norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, zero_centered: bool, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """With y = x / rms(x) and g the weighted gradient: (g - y * mean(g * y)) / rms(x)."""
    scale = weight.to(inverse_rms.dtype)
    scale = 1.0 + scale if zero_centered else scale
    normed = x * inverse_rms
    products = gradient * normed
    of_weight = products.sum(tuple(range(x.dim() - 1))).to(weight.dtype) if trained else None
    mean = products.mul_(scale).mean(-1, keepdim=True)
    of_x = torch.mul(gradient, scale, out=products).sub_(normed.mul_(mean)).mul_(inverse_rms)
    return of_x.to(x.dtype), of_weight


# --- gated feed-forwards ------------------------------------------------------------------------------------


Activation = Callable[[Tensor], Tensor]


class GatedFeedForward(MLP):
    """Megatron's feed-forward, without biases, with less to keep for its backward pass."""

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, Tensor | None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gated(gate_up, self.config.activation_func))


def gated(gate_up: Tensor, activation: Activation, weights: Tensor | None = None) -> Tensor:
    """activation(gate) * up, (..., I), from gate, then up, (..., 2 * I); each row times its weight (...)."""
    # without hooks of a module: those of FlopCounterMode want an autograd graph here
    rows = gate_up.flatten(0, -2)
    activation = getattr(activation, "forward", activation)
    if not torch.is_grad_enabled():
        return _gate(rows, activation, weights).unflatten(0, gate_up.shape[:-1])
    inner = Gate.apply(rows, activation, weights).unflatten(0, gate_up.shape[:-1])
    return _offer(inner, _gate, rows, activation, weights)


class Gate(torch.autograd.Function):
    """`gated`. Its backward pass needs its inputs alone and computes the activation again."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, activation: Activation, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.activation = activation
        return _gate(gate_up, activation, weights)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gate_up, weights = ctx.saved_tensors
        backward = _gate_backward
        derivative = DERIVATIVES.get(getattr(ctx.activation, "__func__", ctx.activation))
        if derivative is None:  # the compiler knows no torch.autograd.grad
            backward = _gate_backward.written
            derivative = partial(_differentiated, ctx.activation)
        of_gate_up, of_weights = backward(gradient, gate_up, ctx.activation, derivative, weights)
        return of_gate_up, None, of_weights


@Fused
def _gate(gate_up: Tensor, activation: Activation, weights: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner = activation(gate) * up
    return inner if weights is None else (inner * weights[..., None]).to(inner.dtype)


@Fused
def _gate_backward(
    gradient: Tensor,
    gate_up: Tensor,
    activation: Activation,
    derivative: Callable[[Tensor, Tensor], Tensor],
    weights: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.chunk(2, dim=-1)
    of_weights, of_inner = None, gradient
    if weights is not None:
        of_inner = (gradient * weights[..., None]).to(gradient.dtype)
    active = activation(gate)
    of_gate = derivative(of_inner * up, gate)
    if weights is not None:
        of_weights = (
            (active * up).to(statistics_dtype(weights.dtype)).mul_(gradient).sum(-1).to(weights.dtype)
        )
    return torch.cat((of_gate, active.mul_(of_inner)), dim=-1), of_weights


def _gelu_tanh_backward(of_active: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(of_active, gate, approximate="tanh")


# Gradients of gates, which round once, by activation: torch.func.vjp, which the compiler knows, is compiled
# again whenever any package registers a pytree node.
DERIVATIVES = {
    silu: torch.ops.aten.silu_backward,
    type(ACT2FN["silu"]).forward: torch.ops.aten.silu_backward,
    type(ACT2FN["gelu_pytorch_tanh"]).forward: _gelu_tanh_backward,
}


def _differentiated(activation: Activation, of_active: Tensor, gate: Tensor) -> Tensor:
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        return torch.autograd.grad(activation(gate), gate, of_active)[0]


# --- rotary embeddings --------------------------------------------------------------------------------------


def inverse_frequencies(
    text_config: Any, layer_type: str | None = None, part_of_head: bool = False
) -> tuple[Tensor, float]:
    """(inverse frequencies (R/2,), factor on cos and sin) of `text_config.rope_parameters`, fp32 on CPU.

    The scaled rules (linear, YaRN, ...) are Transformers' own functions, so they round as Transformers does.
    They read `partial_rotary_factor`; the default rule reads it only with `part_of_head`.
    """
    rule = text_config.rope_parameters[layer_type] if layer_type else text_config.rope_parameters
    with torch.device("cpu"):  # real numbers also while the model is built on the meta device
        if rule["rope_type"] != "default":
            by_layer = {"layer_type": layer_type} if layer_type else {}
            return ROPE_INIT_FUNCTIONS[rule["rope_type"]](text_config, torch.device("cpu"), **by_layer)
        head_dim = getattr(text_config, "head_dim", None)
        head_dim = head_dim or text_config.hidden_size // text_config.num_attention_heads
        width = int(head_dim * rule.get("partial_rotary_factor", 1.0)) if part_of_head else head_dim
        return 1.0 / rule["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width), 1.0


def mrope_axes(sections: list[int], interleaved: bool, frequencies: int) -> Tensor:
    """(R/2,) int64: the position axis (time, height, width) that turns each frequency.

    `sections`, the config's `mrope_section`, says how many frequencies each axis has: in chunks, one axis
    after another, or interleaved: time, height, width, time, ... until height and width are done, then time.
    """
    axes = [section % 3 for section, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(frequencies)]
    return torch.tensor(axes, device="cpu")


class Rotary(nn.Module):
    """cos and sin for every rule a model uses: `forward(position_ids)` -> (rules, T, 2, S, B, 1, R/2) fp32.

    Most models have one rule; Gemma3 has two, for its local and its global layers; a rule of narrower heads
    is padded. Positions are (B, S), or (3, B, S) with `axes` from `mrope_axes`. T is 1 if queries and keys
    use the same table. With `query_scale`, a function of the position ids, T is 2: a scaled table for
    queries, then one for keys. Scaling commutes with rotation, so the scaled table scales the queries.
    """

    def __init__(
        self,
        rules: list[tuple[Tensor, float]],
        axes: Tensor | None = None,
        query_scale: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.register_buffer(
            "inv_freq",
            pad_sequence([frequencies for frequencies, _ in rules], batch_first=True),
            persistent=False,
        )
        self.widths = [len(frequencies) for frequencies, _ in rules]
        self.register_buffer("factors", torch.tensor([factor for _, factor in rules]), persistent=False)
        assert axes is None or len(axes) == self.inv_freq.shape[1], "an axis for every frequency"
        self.register_buffer("axes", axes, persistent=False)
        self.query_scale = query_scale

    def forward(self, position_ids: Tensor) -> Tensor:
        if self.axes is None:
            position_SBR = position_ids.t()[..., None]
        else:
            position_SBR = position_ids.permute(2, 1, 0)[..., self.axes]
        angles = (position_SBR.float() * self.inv_freq[:, None, None, :])[:, :, :, None, :]
        factor = self.factors.view(-1, 1, 1, 1, 1)
        table = torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)[:, None]
        if self.query_scale is None:
            return table
        scale_SB11 = self.query_scale(position_ids.t())[..., None, None]
        return torch.cat((table * scale_SB11, table), dim=1)

    def turns(self, position_ids: Tensor, config: TransformerConfig) -> list[list[list[Tensor]]]:
        """The tables of `rotate` for queries and for keys, which may be one, by rule."""
        return [
            [of_channels(*table[..., :width], config.rotary_interleaved) for table in of_rule]
            for of_rule, width in zip(self(position_ids).to(config.params_dtype), self.widths, strict=True)
        ]

    def query_scales(self, position_ids: Tensor, config: TransformerConfig) -> Tensor | None:
        """The factors (S, B, 1, 1) of `query_scale`, for channels of queries that no table turns."""
        if self.query_scale is None:
            return None
        return self.query_scale(position_ids.t())[..., None, None].to(config.params_dtype)


def of_channels(cos: Tensor, sin: Tensor, adjacent: bool = False) -> list[Tensor]:
    """cos and sin of each channel, from the frequencies' own; the partner's factor has the sin's sign."""
    dim = -1 if adjacent else -2
    return [torch.stack(pair, dim).flatten(-2) for pair in ((cos, cos), (-sin, sin))]


def rotate(x_SBHK: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """Rotary embedding of the first R of K channels; the rest is unchanged.

    cos and sin come from `of_channels`, (S, B, 1, R). A frequency turns a channel of the first half with
    its partner in the second, as in GPT-NeoX; or, if `adjacent`, two that follow each other, as in GPT-J.
    """
    return (Rotate.apply if torch.is_grad_enabled() else _rotated)(x_SBHK, cos, sin, adjacent)


class Rotate(torch.autograd.Function):
    """`rotate`. Its backward pass needs the tables alone, and turns the other way."""

    @staticmethod
    def forward(ctx, x_SBHK: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.adjacent = adjacent
        return _rotated(x_SBHK, cos, sin, adjacent)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin, ctx.adjacent), None, None, None


def _rotated(x_SBHK: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    if x_SBHK.device.type != Fused.compiles_on:
        return rotate_rows(x_SBHK, cos, sin, adjacent)
    rows, cos, sin = (tensor.flatten(0, 1) for tensor in (x_SBHK, cos, sin))
    return rotate_rows(rows, cos, sin, adjacent).view(x_SBHK.shape)


@Fused
def rotate_rows(x_THK: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    width = cos.shape[-1]
    x = x_THK[..., :width] if width < x_THK.shape[-1] else x_THK
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if adjacent else x.roll(width // 2, -1)
    result = (x * cos).add_(partner.mul_(sin))
    return result if x is x_THK else torch.cat((result, x_THK[..., width:]), dim=-1)


# --- queries and keys ---------------------------------------------------------------------------------------


class HeadSettings(NamedTuple):
    """How `turned_heads` norms and turns, see `RMSNorm` and `rotate`; a gate may follow each query."""

    eps: float
    zero_centered: bool
    wide: bool
    adjacent: bool
    has_gates: bool


def turned_heads(
    rows_SBGNK: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    turns: list[list[Tensor]],
    settings: HeadSettings,
) -> tuple[Tensor, ...]:
    """Queries (S, B, H, K), keys and values (S, B, G, K), and gates (S, B, H*K) if there are any.

    Each group of the rows, a linear's output, has its queries, then its key and its value. Queries and keys
    are normed if they have weights, and turned by their tables, in one call in each direction.
    """
    query_cos, query_sin = (table.flatten(0, 1) for table in turns[0])
    key_cos, key_sin = (table.flatten(0, 1) for table in turns[-1])
    return TurnedHeads.apply(
        rows_SBGNK, weights[0], weights[1], query_cos, query_sin, key_cos, key_sin, settings
    )


class TurnedHeads(torch.autograd.Function):
    """`turned_heads`. Its backward pass needs the tables and, of norms, the rows and 1 / root mean square."""

    @staticmethod
    def forward(
        ctx,
        rows_SBGNK: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        query_cos: Tensor,
        query_sin: Tensor,
        key_cos: Tensor,
        key_sin: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, ...]:
        rows = rows_SBGNK.flatten(0, 1)
        query, key, gate, query_rms, key_rms = _turned_heads(
            rows, query_weight, key_weight, query_cos, query_sin, key_cos, key_sin, settings
        )
        kept = None if query_weight is None else rows
        ctx.save_for_backward(
            kept, query_weight, key_weight, query_cos, query_sin, key_cos, key_sin, query_rms, key_rms
        )
        ctx.shape = rows_SBGNK.shape
        ctx.settings = settings
        axes = ctx.shape[:2]
        heads = query.unflatten(0, axes), key.unflatten(0, axes), rows_SBGNK[..., -1, :]
        return heads if gate is None else (*heads, gate.unflatten(0, axes))

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None):
        query, key, value, gate = (x if x is None else x.flatten(0, 1) for x in (query, key, value, gate))
        trained = any(ctx.needs_input_grad[1:3])
        of_rows, of_query_weight, of_key_weight = _turned_heads_backward(
            query, key, value, gate, *ctx.saved_tensors, ctx.settings, trained
        )
        return of_rows.view(ctx.shape), of_query_weight, of_key_weight, None, None, None, None, None


@Fused
def _turned_heads(
    rows_TGNK: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    query_cos: Tensor,
    query_sin: Tensor,
    key_cos: Tensor,
    key_sin: Tensor,
    settings: HeadSettings,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Queries (T, H, K), keys (T, G, K), gates (T, H*K), and 1 / root mean square of queries and keys."""
    eps, zero_centered, wide, adjacent, has_gates = settings
    query, key, _ = rows_TGNK.tensor_split((-2, -1), dim=-2)
    gate = query_rms = key_rms = None
    if has_gates:
        query, gate = query.unflatten(-2, (-1, 2)).unbind(-2)
        gate = gate.flatten(1)
    if query_weight is not None:
        query, query_rms = normed.written(query, query_weight, eps, zero_centered, wide)
        key, key_rms = normed.written(key, key_weight, eps, zero_centered, wide)
    query = rotate_rows.written(query.flatten(1, 2), query_cos, query_sin, adjacent)
    return query, rotate_rows.written(key.squeeze(2), key_cos, key_sin, adjacent), gate, query_rms, key_rms


@Fused
def _turned_heads_backward(
    query_THK: Tensor,
    key_TGK: Tensor,
    value_TGK: Tensor,
    gate: Tensor | None,
    rows_TGNK: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    query_cos: Tensor,
    query_sin: Tensor,
    key_cos: Tensor,
    key_sin: Tensor,
    query_rms: Tensor | None,
    key_rms: Tensor | None,
    settings: HeadSettings,
    trained: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the rows and of the weights; the heads stand for their gradients."""
    _, zero_centered, _, adjacent, _ = settings
    of_query = rotate_rows.written(query_THK, query_cos, -query_sin, adjacent)
    of_query = of_query.unflatten(1, (key_TGK.shape[1], -1))
    of_key = rotate_rows.written(key_TGK, key_cos, -key_sin, adjacent)[:, :, None]
    of_query_weight = of_key_weight = None
    if rows_TGNK is not None:
        query, key, _ = rows_TGNK.tensor_split((-2, -1), dim=-2)
        query = query if gate is None else query.unflatten(-2, (-1, 2)).select(-2, 0)
        of_query, of_query_weight = _norm_backward.written(
            of_query, query, query_weight, query_rms, zero_centered, trained
        )
        of_key, of_key_weight = _norm_backward.written(
            of_key, key, key_weight, key_rms, zero_centered, trained
        )
    if gate is not None:  # it lies beside its query in the rows
        of_query = torch.stack((of_query, gate.view_as(of_query)), dim=-2).flatten(-3, -2)
    return torch.cat((of_query, of_key, value_TGK[:, :, None]), dim=2), of_query_weight, of_key_weight
