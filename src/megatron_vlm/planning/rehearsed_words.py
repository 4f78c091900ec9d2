"""Rehearsals and the search for a layout in words, a line as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import suggestion
from megatron_vlm.planning.plan import RESERVE, MemoryPlan
from megatron_vlm.planning.rehearsal import Rehearsal, rehearse
from megatron_vlm.planning.search import RehearsedLayout, planned_layouts, rehearse_all, representatives
from megatron_vlm.planning.step_time import Gpu, StepTime, step_time


def gpu_with(settings: Sequence[str]) -> Gpu:
    """An H100 with other numbers, given as `name=number`. Raises ConfigError on an unknown name."""
    numbers = asdict(Gpu())
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in numbers:
            raise ConfigError(f"--gpu {setting}: no such number{suggestion(name, numbers)}")
        try:
            numbers[name] = type(numbers[name])(float(value))
        except ValueError as error:
            raise ConfigError(
                f"--gpu {setting}: {value!r} is no number; write {name}={numbers[name]}"
            ) from error
    return Gpu(**numbers)


def rehearsed(plan: MemoryPlan, rank: int | None, settings: Sequence[str]) -> Iterator[str]:
    """Lines about what each rank holds, sends and does in a real step, beside the plan; and its time."""
    gpu = gpu_with(settings)
    yield ""
    ranks = representatives(plan) if rank is None else [rank]
    found = []
    for number in ranks:
        found.append(rehearse(plan.config, plan.description, plan.gpus, number))
        yield from _of_rank(found[-1], plan)
    yield from _of_step(step_time(found, gpu, plan.useful_flops), gpu)


def _of_rank(one: Rehearsal, plan: MemoryPlan) -> Iterator[str]:
    planned = plan.stages[one.stage].memory - RESERVE
    parts = ("weights", "gradients", "optimizer", "activations")
    yield (
        f"Rank {one.rank}, of stage {one.stage}, rehearsed: {one.peak / 1e9:.1f} GB at most ("
        + ", ".join(f"{part} {getattr(one, part) / 1e9:.1f}" for part in parts)
        + f"); the plan says {planned / 1e9:.1f}, {planned / one.peak:.2f} of it."
    )
    yield f"  {one.operations:,.0f} operations of {one.flops('matmul', 'attention') / 1e12:,.0f} TFLOP a step"
    for (group, kind), (calls, nbytes) in sorted(one.collectives.items()):
        yield f"  {group}: {kind}, {calls:,.0f} calls, {nbytes / 1e9:,.2f} GB a step"
    reads = ", ".join(f"{place} {count:,.0f} times" for place, count in one.micro_batch.of(str).items())
    yield f"  The host waits for the device in a micro batch's forward and backward: {reads or 'never'}."
    yield f"  It waits {sum(one.once.of(str).values()):,} times in the rest of a step."


def _of_step(time: StepTime, gpu: Gpu) -> Iterator[str]:
    yield (
        f"A step takes {time.seconds:.2f} s: {time.computing:.2f} computing, "
        f"{time.exchanging:.2f} exchanging, {time.bubble:.2f} waiting for "
        f"other stages, {time.once:.2f} for gradients and optimizer; "
        f"utilisation {time.utilisation:.0%}."
    )
    yield (
        "  if "
        + ", ".join(f"{name} {value:g}" for name, value in asdict(gpu).items())
        + " (--gpu changes one)."
    )


def searched(plan: MemoryPlan, capacity: float, settings: Sequence[str]) -> Iterator[str]:
    """The layouts that fit into `capacity` bytes of each GPU, as they are rehearsed, then the quickest."""
    gpu = gpu_with(settings)
    yield f"\nSearching layouts of {plan.gpus} GPUs of {capacity / 1e9:.0f} GB ..."
    plans = planned_layouts(plan.config, plan.description, plan.gpus, capacity, gpu)
    yield f"{len(plans)} fit by their plans; the best are rehearsed:"
    best: list[RehearsedLayout] = []
    for one in rehearse_all(plans, gpu):
        best.append(one)
        memory = f"{one.memory / 1e9:.0f} GB" + ("" if one.memory <= capacity else ", which does not fit")
        yield f"  {' '.join(one.settings)}: {one.time.seconds:.2f} s, {one.time.utilisation:.0%}, {memory}"
    fitting = [one for one in best if one.memory <= capacity]
    if quickest := min(fitting, key=lambda one: one.time.seconds, default=None):
        yield f"The quickest: {' '.join(quickest.settings)}"
    else:
        yield "No layout fits; use more GPUs, shorter rows or a smaller micro batch."
