"""A plan in words, and what to change if it does not fit or wastes time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from megatron_vlm.config import RunConfig, derived, fewest_processes
from megatron_vlm.models.work import costs
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.planning.plan import RESERVE, KnownCosts, MemoryPlan, make_plan

MAX_IMBALANCE, MAX_BUBBLE = 1.15, 0.2  # above these, the plan says what to change

# --- advice ----------------------------------------------------------------------------------------------


def ways_to_fit(plan: MemoryPlan, capacity: float) -> list[tuple[str, MemoryPlan]]:
    """Changes with which the fullest rank fits into `capacity` bytes, and their plans.

    These are single changes; if no single one is enough, pairs; empty if no pair is enough.
    """
    changes = list(_changes(plan.config))
    for together in (1, 2):
        tried = ((pair, _changed(plan, pair)) for pair in combinations(changes, together))
        found = [(" ".join(pair), other) for pair, other in tried if other and other.memory <= capacity]
        if found:
            return found
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


# --- words -----------------------------------------------------------------------------------------------


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
        *["Weights include the copy of the trained ones that preferences are compared with."]
        * costs.reference_passes(config),
        f"Operations for each token: {_flops(plan.language_model_flops)} in the language model, "
        f"{_flops(plan.tower_flops)} in the tower,",
        f"with {per_row:.1f} images of {tokens} visual tokens in a row (data.visual_share "
        f"{config.data.visual_share:g}, data.max_pixels {config.data.max_pixels or costs.DEFAULT_IMAGE}).",
    ]
    if parallel.pp > 1:
        lines.append(
            f"Pipeline: the busiest stage has {plan.imbalance:.2f} of the mean work; stages wait for one "
            f"another {plan.bubble:.0%} of a step."
        )
    return "\n".join(lines)


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
                " ".join(f"{held.start}-{held.stop - 1}" for held in stage.layers),
                f"{stage.parameters:,}",
                *(f"{size / 1e9:.1f}" for size in parts),
                f"{stage.flops / mean:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


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
            yield "  No change of recomputation, tp, pp, ep or seq_length, alone or with another, is enough."
    if plan.imbalance > MAX_IMBALANCE:
        yield from _against_imbalance(plan)
    if plan.bubble > MAX_BUBBLE:
        config = plan.config
        yield (
            f"Stages wait {plan.bubble:.0%} of a step: raise train.global_batch_size above "
            f"{config.train.global_batch_size}, or vpp above {config.parallel.vpp}."
        )


def _against_imbalance(plan: MemoryPlan) -> Iterator[str]:
    busiest = max(range(len(plan.stages)), key=lambda i: plan.stages[i].flops)
    remedy = "use fewer or more stages"
    if busiest == 0 and plan.config.parallel.tp > 1 and not plan.config.parallel.images_spread:
        remedy = "spread its images: parallel.vision_dp=true"
    elif busiest == 0 and sum(map(len, plan.stages[0].layers)) == plan.config.parallel.vpp:
        remedy = "its tower alone is more than a stage's share: lower pp"
    yield f"Stage {busiest} has {plan.imbalance:.2f} of the mean work; {remedy}."
