"""Plans, rehearsals and the search for a layout in words, with what to change in a plan that does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations

from megatron_vlm.config import ConfigError, RunConfig, derived, fewest_processes
from megatron_vlm.extras.plan.plan import RESERVE, KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.rehearsal import Rehearsal, rehearse
from megatron_vlm.extras.plan.search import MOST_REHEARSED, TO_FIT, planned_layouts, representatives
from megatron_vlm.extras.plan.step_time import Gpu, StepTime, step_time
from megatron_vlm.messages import aligned, suggestion
from megatron_vlm.models.work import costs
from megatron_vlm.overrides import apply_overrides, split_override

# --- advice ----------------------------------------------------------------------------------------------


def ways_to_fit(plan: MemoryPlan, capacity: float) -> list[tuple[str, MemoryPlan]]:
    """Changes with which the fullest rank fits into `capacity` bytes, and their plans.

    These are single changes; if no single one is enough, pairs; empty if no pair is enough.
    """
    changes = list(_changes(plan.config))
    for together in (1, 2):
        tried = ((pair, _changed(plan, pair)) for pair in combinations(changes, together))
        fitting = [(" ".join(pair), other) for pair, other in tried if other and other.memory <= capacity]
        if fitting:
            return fitting
    return []


def _changes(config: RunConfig) -> Iterator[str]:
    """Settings worth trying, the cheapest first."""
    parallel = config.parallel
    rows = config.train.micro_batch_size
    if rows > 1:
        yield f"train.micro_batch_size={rows // 2}"
    if config.model.recompute != "full":
        yield "model.recompute=full"
    yield from (f"parallel.tp={tp}" for tp in (2, 4, 8) if tp > parallel.tp)
    yield from (f"parallel.pp={parallel.pp * more}" for more in (2, 4))
    yield f"parallel.ep={parallel.ep * 2}"
    if parallel.distributed_optimizer and not config.optimizer.offload:
        yield "optimizer.offload=true"
    yield f"data.seq_length={config.data.seq_length // 2}"


def _changed(plan: MemoryPlan, settings: tuple[str, ...]) -> MemoryPlan | None:
    """The plan with other settings, on more GPUs if they need more; None if nothing divides."""
    config = apply_overrides(plan.config, settings)
    fewest = fewest_processes(config.parallel)
    try:
        gpus = -(-plan.gpus // fewest) * fewest
        return make_plan(config, plan.description, gpus, KnownCosts(plan.image))
    except ValueError:
        return None


# --- notes -----------------------------------------------------------------------------------------------


def describe(plan: MemoryPlan) -> str:
    """The plan as text: a line for each stage, and the assumptions."""
    config = plan.config
    parallel = plan.config.parallel
    sizes = [("tp", parallel.tp), ("pp", parallel.pp), ("vpp", parallel.vpp), ("ep", parallel.ep)]
    layout = " · ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "tp")
    facts = derived(config, plan.gpus)
    per_row = plan.images_per_row
    tokens = plan.image.tokens
    lines = [
        f"{config.name} on {_gpus(plan)}: {layout} · dp {facts['data_parallel']}; "
        f"{facts['micro_batches_per_step']} micro batches of {config.train.micro_batch_size} × "
        f"{config.data.seq_length} tokens a step",
        "",
        *_table(plan),
        "",
        "Parameters are exact; GB (10^9 bytes) of memory an estimate, for each rank of the stage, with "
        f"{RESERVE / 1e9:.1f} in reserve.",
        _on_the_host(plan),
        *["Weights include the copy of the trained ones that preferences are compared with."]
        * costs.reference_passes(config),
        f"Operations for each token: {_flops(plan.language_model_flops)} in the language model, "
        f"{_flops(plan.tower_flops)} in the tower,",
        f"with {per_row:.1f} images of {tokens} visual tokens in a row (data.visual_share "
        f"{config.data.visual_share:g}, data.max_pixels {config.data.max_pixels or costs.DEFAULT_IMAGE}).",
    ]
    if parallel.pp > 1:
        lines += [
            f"Pipeline: the busiest stage has {plan.imbalance:.2f} of the mean work, which another pp or "
            f"parallel.vision_dp changes; stages wait for one another {plan.bubble:.0%} of a step, which a "
            "larger train.global_batch_size or vpp lowers."
        ]
    return "\n".join(lines)


def _on_the_host(plan: MemoryPlan) -> str:
    host = plan.stages[plan.fullest_host].host
    parts = ", ".join(f"{size / 1e9:.1f} for {what}" for what, size in host.items())
    return (
        f"A rank of stage {plan.fullest_host} needs the most of its host, {sum(host.values()) / 1e9:.1f} GB "
        f"besides programs and data workers: {parts}."
    )


def _table(plan: MemoryPlan) -> list[str]:
    memory = ("weights", "gradients", "optimizer", "activations", "GB")
    heads = ("stage", "layers", "parameters", *memory, "work")
    mean = sum(stage.flops for stage in plan.stages) / len(plan.stages)
    rows = [heads]
    for number, stage in enumerate(plan.stages):
        parts = (stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.memory)
        rows.append(
            (
                str(number),
                " ".join(f"{layers.start}-{layers.stop - 1}" for layers in stage.layers),
                f"{stage.parameters:,}",
                *(f"{size / 1e9:.1f}" for size in parts),
                f"{stage.flops / mean:.2f}",
            )
        )
    return aligned(rows, ">")


def _gpus(plan: MemoryPlan) -> str:
    return f"{plan.gpus} GPU" + "s" * (plan.gpus > 1)


def _flops(count: float) -> str:
    return f"{count / 1e9:.1f} GFLOP"


def advice(plan: MemoryPlan, capacity: float) -> Iterator[str]:
    """First whether the fullest rank fits into `capacity` bytes, then what to change, a line each."""
    need = f"{plan.memory / 1e9:.0f} of {capacity / 1e9:.0f} GB"
    if plan.memory <= capacity:
        yield f"It fits: the fullest rank, of stage {plan.fullest}, needs {need}."
    else:
        yield f"It does not fit: the fullest rank, of stage {plan.fullest}, needs {need}."
        ways = ways_to_fit(plan, capacity)
        for change, other in ways:
            yield f"  {change}: {other.memory / 1e9:.0f} GB on {_gpus(other)}"
        if not ways:
            yield (
                "  No change of recomputation, tp, pp, ep, offload or seq_length, alone or with another, is "
                "enough."
            )


# --- rehearsals and the search for a layout, a line as soon as it is known --------------------------------


def gpu_with(settings: Sequence[str]) -> Gpu:
    """An H100 with other numbers, given as `name=number`. Raises ConfigError on an unknown name."""
    numbers = asdict(Gpu())
    for setting in settings:
        name, value = split_override(setting)
        if name not in numbers:
            raise ConfigError(f"--gpu {setting}: no such number{suggestion(name, numbers)}")
        numbers[name] = type(numbers[name])(float(value))
    return Gpu(**numbers)


def rehearsed(plan: MemoryPlan, rank: int | None, settings: Sequence[str]) -> Iterator[str]:
    """Lines about what each rank holds, sends and does in a real step, beside the plan; and its time."""
    gpu = gpu_with(settings)
    yield ""
    ranks = representatives(plan) if rank is None else [rank]
    rehearsals = []
    for number in ranks:
        rehearsals.append(rehearse(plan.config, plan.description, plan.gpus, number))
        yield from _of_rank(rehearsals[-1], plan)
    yield from _of_step(step_time(rehearsals, gpu, plan.useful_flops), gpu)


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
    layouts = planned_layouts(plan.config, plan.description, plan.gpus, capacity, gpu, TO_FIT, overlap=True)
    yield f"{len(layouts)} fit by their plans; the best are rehearsed:"
    fitting = []
    for layout, planned in layouts[:MOST_REHEARSED]:
        ranks = [rehearse(planned.config, plan.description, plan.gpus, r) for r in representatives(planned)]
        memory = max(one.peak for one in ranks) + RESERVE
        time = step_time(ranks, gpu, planned.useful_flops)
        name = " ".join(layout)
        if memory <= capacity:
            fitting.append((time.seconds, name))
        said = f"{memory / 1e9:.0f} GB" + ("" if memory <= capacity else ", which does not fit")
        yield f"  {name}: {time.seconds:.2f} s, {time.utilisation:.0%}, {said}"
    if fitting:
        yield f"The quickest: {min(fitting)[1]}"
    else:
        yield "No layout fits; use more GPUs, shorter rows or a smaller micro batch."
