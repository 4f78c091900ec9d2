"""Functions of tensors that CUDA runs compiled, as one or two kernels each, and other devices as written.

Their callers, here and in `feed_forward`, are autograd functions with backward passes of their own: so what
is kept between the two passes does not depend on a compiler and is the same on every device, `meta` included.
Compiled, they have not run on a GPU yet, only on a CPU in tests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, update_wrapper
from typing import Any

import torch
from torch import Tensor


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


def norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, in_fp32: bool = False) -> Tensor:
    """The norm of `RMSNorm`."""
    if torch.is_grad_enabled():
        return Norm.apply(x, weight, eps, zero_centered, in_fp32)
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
