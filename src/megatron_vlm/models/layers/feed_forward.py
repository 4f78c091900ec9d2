"""The gated feed-forward (arXiv 2002.05202) with any activation function: SwiGLU, GeGLU, ..."""

from collections.abc import Callable

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_vlm.models.layers.kernels.fused import Fused, statistics_dtype

Activation = Callable[[Tensor], Tensor]


class GatedFeedForward(MLP):
    """Megatron's feed-forward, without biases, with less to keep for its backward pass."""

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, Tensor | None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gated(gate_up, self.config.activation_func))


def gated(gate_up: Tensor, activation: Activation, weights: Tensor | None = None) -> Tensor:
    """activation(gate) * up, (..., I), from gate, then up, (..., 2 * I); each row times its weight (...)."""
    # without hooks of a module: those of FlopCounterMode want an autograd graph here
    gate = Gate.apply if torch.is_grad_enabled() else _gate
    rows = gate_up.flatten(0, -2)
    return gate(rows, getattr(activation, "forward", activation), weights).unflatten(0, gate_up.shape[:-1])


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
        of_gate_up, of_weights = _gate_backward(gradient, gate_up, ctx.activation, weights)
        return of_gate_up, None, of_weights


@Fused
def _gate(gate_up: Tensor, activation: Activation, weights: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner = activation(gate) * up
    return inner if weights is None else (inner * weights[..., None]).to(inner.dtype)


@Fused
def _gate_backward(
    gradient: Tensor, gate_up: Tensor, activation: Activation, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.chunk(2, dim=-1)
    of_weights, of_inner = None, gradient
    if weights is not None:
        of_inner = (gradient * weights[..., None]).to(gradient.dtype)
    active, of_gate = _with_gradient(activation, gate, of_inner * up)
    if weights is not None:
        of_weights = (
            (active * up).to(statistics_dtype(weights.dtype)).mul_(gradient).sum(-1).to(weights.dtype)
        )
    return torch.cat((of_gate, active.mul_(of_inner)), dim=-1), of_weights


def _with_gradient(activation: Activation, gate: Tensor, of_active: Tensor) -> tuple[Tensor, Tensor]:
    """(activation(gate), the gate's gradient)"""
    if torch.compiler.is_compiling():
        # The compiler knows no torch.autograd.grad. In fp32, because torch.func takes a derivative of several
        # operations, which would be rounded one by one.
        active, derivative = torch.func.vjp(
            lambda x: activation(x.to(statistics_dtype(x.dtype))).to(x.dtype), gate
        )
        return active, derivative(of_active)[0]
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        active = activation(gate)
    return active.detach(), torch.autograd.grad(active, gate, of_active)[0]
