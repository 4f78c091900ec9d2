"""A step of Qwen3-VL-8B at two depths: one layer is their difference, without embedding, tower, output layer
and the start of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu_check.clock import seconds, under_load
from gpu_check.expected import RESERVED, read_expected
from gpu_check.rows import Row
from gpu_check.sizes import ON_CUDA, About, Sizes, described, documents_of
from gpu_check.stack import (
    MODEL,
    PUBLISHED,
    Case,
    OurStep,
    cases,
    documents,
    example_prompt,
    flops_of,
    free,
    measured,
    packed,
)
from megatron_vlm.batch import Batch
from megatron_vlm.generation.generate import generate
from megatron_vlm.training.figures import peak_flops
from megatron_vlm.training.losses import token_losses
from megatron_vlm.training.step import clip_and_step


@dataclass(frozen=True)
class Timed:
    """Seconds of one depth."""

    layers: int
    micro_batch: float  # forward and backward
    optimizer: float
    token: float  # of decoding; 0 where it was not measured
    flops: float  # of a micro batch, without what is recomputed


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    known = read_expected(about.folder)
    for case in cases(sizes):
        try:
            for row in rows_of(case, sizes):
                yield replace(row, expected=row.expected or known.get(row.what))
        except torch.OutOfMemoryError:
            yield Row("step", case.name, "out of memory")
        free()


def rows_of(case: Case, sizes: Sizes) -> Iterator[Row]:
    """The deepest model first, as it is the one that may not fit."""
    times = []
    for layers in reversed(case.depths):
        step = OurStep(case.config(), described(MODEL, sizes.with_layers(layers)))
        batch = packed(documents(documents_of(case.tokens), step.description))
        if layers == case.depths[-1]:
            yield from whole_step(case, step, batch, sizes)
        step(batch)  # gradients, for the optimizer
        times.append(timed(case, step, batch, sizes))
        del step
        free()
    yield Row("step", f"{case.name}, optimizer, milliseconds", 1000 * times[0].optimizer)
    if len(times) > 1:
        peak = peak_flops(torch.cuda.get_device_name()) if ON_CUDA else None
        yield from one_layer(case, *times, peak)


def timed(case: Case, step: OurStep, batch: Batch, sizes: Sizes) -> Timed:
    rounds = max(1, sizes.rounds // 2)
    micro_batch = seconds(lambda: token_losses(step.model, [batch]), rounds)
    optimizer = seconds(lambda: clip_and_step(step.optimizer), rounds)
    token = seconds_a_token(step, sizes) if case.is_first else 0.0
    layers = step.description.architecture["num_layers"]
    return Timed(layers, micro_batch, optimizer, token, flops_of(batch, step.description))


def seconds_a_token(step: OurStep, sizes: Sizes) -> float:
    """Seconds of a token of one answer, from the cache: the difference of a long and a short answer."""
    prompt = example_prompt(sizes.prompt_tokens, step.description)
    short, long = 2, 2 + sizes.decoded_tokens
    took = [seconds(partial(generate, step.chunks, [prompt], count), 1) for count in (short, long)]
    return (took[1] - took[0]) / sizes.decoded_tokens


def whole_step(case: Case, step: OurStep, batch: Batch, sizes: Sizes) -> Iterator[Row]:
    """The deepest model's: attention's kernels, the step as training has it, clocks and power under it."""
    if case.is_first:
        backends = ", ".join(sorted(set(step.chunks[0].config.attention_backends.values())))
        yield Row("step", "attention", backends, wrong=ON_CUDA and "dense" in backends)
    one = packed(documents([case.tokens], step.description)) if not case.settings else None
    for what, row in {case.name: batch, f"{case.name}, one document": one}.items():
        if row is not None:
            flops = flops_of(row, step.description)
            yield from measured("step", what, partial(step, row), case.tokens, flops, sizes)
    if ON_CUDA:
        yield from memory_rows(case.name, device_memory())
        for name, value in under_load(partial(step, batch)).items():
            yield Row("step", f"{case.name}, {name}", value)


def device_memory() -> tuple[int, int, int]:
    """(bytes in use on the card, reserved by the allocator at most, in tensors at most)"""
    free_bytes, total = torch.cuda.mem_get_info()
    return total - free_bytes, torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def memory_rows(what: str, nbytes: tuple[int, int, int]) -> Iterator[Row]:
    """What a plan's reserve stands for, and its parts."""
    used, reserved, peak = (number / 2**30 for number in nbytes)
    yield Row("step", f"{what}, GiB of driver, context and libraries", used - reserved)
    yield Row("step", f"{what}, GiB of fragmentation", reserved - peak)
    yield Row(
        "step", f"{what}, GiB in use beside tensors, the plan's reserve", used - peak, expected=RESERVED
    )


def one_layer(case: Case, deep: Timed, shallow: Timed, peak: float | None) -> Iterator[Row]:
    """What a layer takes, what the rest of a step takes, and the published model's layers by these. `peak` is
    what the card can do in a second, if that is known."""
    between = deep.layers - shallow.layers

    def layer(of: str) -> float:
        return (getattr(deep, of) - getattr(shallow, of)) / between

    def at_full_depth(of: str) -> float:
        return getattr(deep, of) + (PUBLISHED - deep.layers) * layer(of)

    name = case.name
    yield Row("step", f"{name}, one layer, milliseconds", 1000 * layer("micro_batch"))
    yield Row("step", f"{name}, one layer, model TFLOP/s", layer("flops") / layer("micro_batch") / 1e12)
    outside = deep.micro_batch - deep.layers * layer("micro_batch")
    yield Row("step", f"{name}, micro batch without layers, milliseconds", 1000 * outside)
    whole = f"{name}, all {PUBLISHED} layers by these, micro batch"
    yield Row("step", f"{whole}, milliseconds", 1000 * at_full_depth("micro_batch"))
    if peak:
        yield Row("step", f"{name}, one layer, MFU", layer("flops") / layer("micro_batch") / peak)
        yield Row("step", f"{whole}, MFU", at_full_depth("flops") / at_full_depth("micro_batch") / peak)
    if deep.token:
        yield Row("step", "decoding, one layer, milliseconds a token", 1000 * layer("token"))
        whole = f"decoding, all {PUBLISHED} layers by these, milliseconds a token"
        yield Row("step", whole, 1000 * at_full_depth("token"))
