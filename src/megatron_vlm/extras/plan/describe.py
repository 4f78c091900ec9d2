"""Plans, rehearsals and the search for a layout, as lines of text."""

from collections.abc import Iterator

from megatron_vlm.config import derived
from megatron_vlm.extras.plan.plan import RESERVE, MemoryPlan
from megatron_vlm.messages import aligned
from megatron_vlm.models import costs

MOST_REHEARSED = 5  # layouts of a search


def describe(plan: MemoryPlan, capacity: float) -> Iterator[str]:
    """Give the plan as text: a line for each stage, the assumptions, and whether it fits."""
    config = plan.config
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    layout = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tp")
    # the layout, a line for each stage, then what was assumed
    numbers = derived(config, plan.gpus)
    yield (
        f"{config.name} on {_gpus(plan)}: {layout} · dp {numbers['data_parallel']}; "
        f"{numbers['micro_batches_per_step']} micro batches of {config.train.micro_batch_size} × "
        f"{config.data.seq_length} tokens a step\n"
    )
    yield from _table(plan)
    yield (
        "\nParameters are exact. Memory is an estimate in GB (10^9 bytes) for each rank of the stage, with "
        f"{RESERVE / 1e9:.1f} in reserve."
    )
    yield (
        f"Rows have {costs.images_per_row(config, plan.image):.1f} images of {plan.image.tokens} visual "
        f"tokens (data.visual_share {config.data.visual_share:g}, data.max_pixels "
        f"{config.data.max_pixels or costs.DEFAULT_IMAGE})."
    )
    if config.optimizer.offload:
        offloaded = max(stage.offloaded for stage in plan.stages)
        yield f"Adam keeps {offloaded / 1e9:.1f} GB for each rank in its host's memory."
    # the last line says whether it fits and, if not, what to change
    need = (
        f"the fullest rank, of stage {plan.fullest}, needs {plan.memory / 1e9:.0f} of {capacity / 1e9:.0f} GB"
    )
    if plan.memory <= capacity:
        yield f"It fits: {need}."
    else:
        yield (
            f"It does not fit: {need}. Try model.recompute=full, optimizer.offload=true, a larger tp "
            "or more GPUs; `plan --gpus N --search` finds layouts of N GPUs that fit."
        )


def _table(plan: MemoryPlan) -> list[str]:
    parts = ("weights", "gradients", "optimizer", "activations", "memory")
    rows = [("stage", "layers", "parameters", *parts, "work")]
    mean = sum(stage.flops for stage in plan.stages) / len(plan.stages)
    for number, stage in enumerate(plan.stages):
        layers = " ".join(f"{part.start}-{part.stop - 1}" for part in stage.layers)
        memory = (f"{getattr(stage, part) / 1e9:.1f}" for part in parts)
        rows.append((str(number), layers, f"{stage.parameters:,}", *memory, f"{stage.flops / mean:.2f}"))
    return aligned(rows, ">")


def _gpus(plan: MemoryPlan) -> str:
    return f"{plan.gpus} GPU" + "s" * (plan.gpus > 1)


# --- rehearsals and the search for a layout, a line as soon as it is known --------------------------------


def rehearsed(plan: MemoryPlan, rank: int | None) -> Iterator[str]:
    """Give lines about what each rank holds and sends in a real step, beside the plan."""
    from megatron_vlm.extras.plan.rehearsal import rehearse

    for number in representatives(plan) if rank is None else [rank]:
        rehearsal = rehearse(plan.config, plan.description, plan.gpus, number)
        planned = plan.stages[rehearsal.stage].memory - RESERVE
        parts = ("weights", "gradients", "optimizer", "activations")
        sizes = ", ".join(f"{part} {getattr(rehearsal, part) / 1e9:.1f}" for part in parts)
        yield (
            f"\nRank {number}, of stage {rehearsal.stage}, rehearsed: {rehearsal.peak / 1e9:.1f} GB at most "
            f"({sizes}); the plan says {planned / 1e9:.1f}, {planned / rehearsal.peak:.2f} of it."
        )
        for (group, kind), (calls, nbytes) in sorted(rehearsal.exchanged().items()):
            yield f"  {group}: {kind}, {calls:,.0f} calls, {nbytes / 1e9:,.2f} GB a step"


def representatives(plan: MemoryPlan) -> list[int]:
    """Return the first ranks of the stages that differ: the first, the last, and the fullest."""
    pp = plan.config.parallel.pp
    return [stage * plan.gpus // pp for stage in sorted({0, pp - 1, plan.fullest})]


def searched(plan: MemoryPlan, capacity: float) -> Iterator[str]:
    """Give the quickest layouts that fit by their plans, and the first whose rehearsal fits, too."""
    from megatron_vlm.extras.plan.rehearsal import rehearse
    from megatron_vlm.extras.plan.search import estimated_seconds, planned_layouts

    yield f"\nSearching layouts of {_gpus(plan)} of {capacity / 1e9:.0f} GB ..."
    layouts = planned_layouts(plan.config, plan.description, plan.gpus, capacity)
    yield f"{len(layouts)} fit by their plans. The quickest, with their estimated time over the first's:"
    best = layouts[:MOST_REHEARSED]
    for settings, planned in best:
        time = estimated_seconds(planned) / estimated_seconds(best[0][1])
        yield f"  {' '.join(settings)}: {time:.2f}, {planned.memory / 1e9:.0f} GB"
    for settings, planned in best:
        ranks = representatives(planned)
        peaks = [rehearse(planned.config, plan.description, plan.gpus, rank).peak for rank in ranks]
        memory = max(peaks) + RESERVE
        if memory <= capacity:
            yield f"The quickest whose rehearsal fits, with {memory / 1e9:.0f} GB: {' '.join(settings)}"
            return
    yield "No layout fits; use more GPUs, shorter rows or a smaller micro batch."
