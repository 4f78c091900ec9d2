"""Seconds of a call on the device, from its own clock."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_check.sizes import ON_CUDA, Sizes

LONGEST_QUERY = 20  # seconds


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


QUERY = {  # names of nvidia-smi
    "clocks.sm": "SM clock, MHz",
    "clocks.max.sm": "SM clock at most, MHz",
    "power.draw": "power, W",
    "power.limit": "power at most, W",
    "temperature.gpu": "degrees Celsius",
}


def under_load(call: Callable[[], object]) -> dict[str, float | str]:
    """Clocks, power and temperature of the card while it works: nvidia-smi is asked during calls.

    It says why if nvidia-smi does not answer.
    """
    card = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    words = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", f"--id={card}"]
    return asked_during(call, words)


def asked_during(call: Callable[[], object], words: list[str]) -> dict[str, float | str]:
    """The answer of a program that is asked for QUERY while `call` is called again and again."""
    try:
        asked = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        return {"clocks and power": f"not known: {error}"}
    began = time.monotonic()
    while asked.poll() is None and time.monotonic() - began < LONGEST_QUERY:
        call()
    asked.kill()
    answer = asked.communicate()[0].strip()
    values = answer.splitlines()[0].split(", ") if answer else []
    if len(values) != len(QUERY):
        return {"clocks and power": f"not known: {answer[:200] or 'nvidia-smi says nothing'}"}
    return {name: _number(value) for name, value in zip(QUERY.values(), values, strict=True)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # such as [N/A]


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
