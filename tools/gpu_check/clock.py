"""Seconds of a call on the device, from its own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_check.sizes import ON_CUDA, Sizes


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The median of so many calls, after a third as many and at least two: these compile, choose kernels and
    take memory."""
    for _ in range(max(2, rounds // 3)):
        call()
    times = [_once(call) for _ in range(rounds)]
    return statistics.median(times)


def _once(call: Callable[[], object]) -> float:
    if not ON_CUDA:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def both_ways(sizes: Sizes, function: Callable[..., Tensor], *inputs: Tensor) -> float:
    """Seconds of a function forward and backward and of nothing else."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(function(*inputs))
    return seconds(lambda: torch.autograd.grad(function(*inputs), inputs, gradient), sizes.rounds)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The function's result and the gradients of its inputs for a gradient that is the same at every call."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = function(*inputs)
    made = torch.Generator(output.device).manual_seed(1)
    gradient = torch.randn(output.shape, generator=made, device=output.device, dtype=torch.float32)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype))]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, of the largest number of the same tensor; NaN if there is one."""
    found = []
    for a, b in zip(ours, theirs, strict=True):
        if b.numel():
            found.append(((a.float() - b.float()).abs().max() / b.float().abs().max()).item())
    return max(found, key=lambda error: (error != error, error), default=0.0)
