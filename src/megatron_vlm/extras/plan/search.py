"""The layouts of a run that fit by their plans, the quickest first by a simple model of a step's time.

The model ranks layouts; `tools/gpu_check` measures what it assumes. It counts products at a share of an
H100's peak, and exchanges over the slowest link of their ranks by the ring algorithm (an H100 SXM's data
sheet, nodes of eight with a network card of 400 Gb/s for each). The shares are assumptions.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator

from megatron_vlm.config import RunConfig, derived
from megatron_vlm.extras.plan.plan import RESERVE, KnownCosts, MemoryPlan, Stage, make_plan
from megatron_vlm.extras.plan.rehearsal import rehearse
from megatron_vlm.models import costs
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES, recomputed_layers
from megatron_vlm.models.layers.attention_sizes import heads_of
from megatron_vlm.overrides import apply_overrides

MOST_REHEARSED = 5  # layouts of a search
SIZES = (1, 2, 4, 8, 16, 32)
NODE = 8  # GPUs
# a row's fewest tokens on a rank of context parallelism: shorter rows are cheaper on whole ranks
FEWEST_TOKENS = 8192
IN_BF16 = "optimizer.reduce_in_fp32=false"
# what a layout may change to fit, in this order: with Adam's state on the host, numbers stay the same to the
# bit; with gradients added up in bf16 they do not
TO_FIT = (
    (),
    ("optimizer.offload=true",),
    (IN_BF16,),
    ("optimizer.offload=true", IN_BF16),
)

PEAK = 989e12  # operations a second in bf16
PRODUCTS = 0.7 * PEAK  # of products of matrices
ATTENTION = 0.35 * PEAK  # of FlashAttention 2, forward and backward
LAUNCH = 120 * 15e-6  # seconds in which the host starts the operations of a layer in all its passes
LINK = 0.8 * 450e9  # bytes a second to other GPUs of the node, each way
NETWORK = 0.8 * 50e9  # bytes a second to other nodes
HOST = 50e9  # bytes a second to the host's memory, and as many from it at the same time
LATENCY = 20e-6  # seconds that the smallest exchange takes
AGAIN = 1.03  # a step's time with model.recompute=selective over its time without
BESIDE = 0.85  # of its speed that a product keeps while an exchange runs beside it
# how long a tower takes over its operations' own time: Transformers' layers are fused in part alone
TOWER = 2


def searched(plan: MemoryPlan, capacity: float) -> Iterator[str]:
    """Give the quickest layouts that fit by their plans, and the first whose rehearsal fits, too."""
    yield f"\nSearching layouts of {plan.gpus} GPUs of {capacity / 1e9:.0f} GB ..."
    layouts = planned_layouts(plan.config, plan.description, plan.gpus, capacity)
    yield f"{len(layouts)} fit by their plans. The quickest, with their estimated time over the first's:"
    best = layouts[:MOST_REHEARSED]
    for settings, planned in best:
        time = estimated_seconds(planned) / estimated_seconds(best[0][1])
        yield f"  {' '.join(settings)}: {time:.2f}, {planned.memory / 1e9:.0f} GB"
    for settings, planned in best:
        ranks = planned.representatives
        peaks = [rehearse(planned.config, plan.description, plan.gpus, rank).peak for rank in ranks]
        memory = max(peaks) + RESERVE
        if memory <= capacity:
            yield f"The quickest whose rehearsal fits, with {memory / 1e9:.0f} GB: {' '.join(settings)}"
            return
    yield "No layout fits; use more GPUs, shorter rows or a smaller micro batch."


def planned_layouts(
    config: RunConfig, description: Description, gpus: int, capacity: float
) -> list[tuple[tuple[str, ...], MemoryPlan]]:
    """Return settings and plans of all layouts on `gpus` GPUs that need at most `capacity` bytes of each.

    They are in the order of an estimated step's time; layouts that change numbers come last. tp stays inside
    a node, the batches as they are. Each layout comes with the first of the changes TO_FIT with which it
    fits, and recomputes as few layers as fit.
    """
    known_costs = KnownCosts()
    fitting = []
    for layout in _layouts(config, description, gpus):
        for settings in ((*layout, *change) for change in TO_FIT):
            try:
                plan = make_plan(apply_overrides(config, settings), description, gpus, known_costs)
            except ValueError:
                continue  # it does not divide GPUs, model or batch
            if plan.memory <= capacity:
                settings, plan = _fewest_recomputed(config, settings, plan, capacity, known_costs)
                fitting.append((estimated_seconds(plan), settings, plan))
                break
    fitting.sort(key=lambda entry: (IN_BF16 in entry[1], entry[0]))
    return [(settings, plan) for _, settings, plan in fitting]


def _fewest_recomputed(
    config: RunConfig, settings: tuple[str, ...], plan: MemoryPlan, capacity: float, known_costs: KnownCosts
) -> tuple[tuple[str, ...], MemoryPlan]:
    """The settings and the plan, with the fewest layers recomputed that still fit."""
    if plan.config.model.recompute != "full":
        return settings, plan

    def planned(layers: int) -> tuple[tuple[str, ...], MemoryPlan]:
        fewer = (*settings, f"model.recompute_layers={layers}")
        return fewer, make_plan(apply_overrides(config, fewer), plan.description, plan.gpus, known_costs)

    every = max(len(part) for stage in plan.stages for part in stage.layers)
    enough = bisect_left(range(every), True, key=lambda layers: planned(layers)[1].memory <= capacity)
    return planned(enough) if enough < every else (settings, plan)


def _layouts(config: RunConfig, description: Description, gpus: int) -> Iterator[tuple[str, ...]]:
    experts = SIZES if "num_moe_experts" in description.architecture else (1,)
    sizes = itertools.product(SIZES, SIZES, SIZES, experts, (1, 2), ("none", "selective", "full"))
    for tp, pp, cp, ep, vpp, recompute in sizes:
        fits = tp <= NODE and gpus % (tp * pp * cp) == 0 and gpus % (pp * ep) == 0
        is_long = cp == 1 or config.data.seq_length // cp >= FEWEST_TOKENS
        if fits and is_long and (vpp == 1 or pp > 1):
            layout = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": vpp, "tp_comm_overlap": tp > 1}
            settings = (f"parallel.{name}={value}".lower() for name, value in layout.items())
            yield (*settings, f"model.recompute={recompute}")


def estimated_seconds(plan: MemoryPlan) -> float:
    """Return an estimate of a step's time, in seconds; stages wait for the busiest one."""
    config = plan.config
    seconds = [
        (stage.flops - stage.attention_flops) / PRODUCTS + stage.attention_flops / ATTENTION
        for stage in plan.stages
    ]
    images = config.train.micro_batch_size * costs.images_per_tower(config, plan.image)
    tower = costs.vision_passes(config, plan.image) * images * plan.image.flops
    seconds[0] += (TOWER - 1) * tower / PRODUCTS
    # where operations are small, the device waits for the host
    seconds = [
        max(of_stage, LAUNCH * sum(map(len, stage.layers)))
        for of_stage, stage in zip(seconds, plan.stages, strict=True)
    ]
    busiest = plan.stages[seconds.index(max(seconds))]
    micro_batch_seconds = max(seconds) + _exchanging(plan, busiest)
    if config.model.recompute == "selective":
        micro_batch_seconds *= AGAIN
    micro_batches = derived(config, plan.gpus)["micro_batches_per_step"]
    waiting = (config.parallel.pp - 1) / config.parallel.vpp  # micro batches; arXiv 2104.04473
    # once a step, gradients and weights travel, and so does what Adam keeps on the host
    replicas = plan.gpus // (config.parallel.tp * config.parallel.pp)
    once = _exchange(busiest.gradients + busiest.weights, replicas, config.parallel.tp)
    once += busiest.offloaded / HOST
    return micro_batch_seconds * (micro_batches + waiting) + once


def _exchanging(plan: MemoryPlan, stage: Stage) -> float:
    """Seconds in which a stage's layers wait for exchanges of a micro batch."""
    config = plan.config
    parallel = config.parallel
    architecture = plan.description.architecture
    value = DTYPES[config.model.dtype].itemsize
    layers = sum(map(len, stage.layers))
    again = sum(len(recomputed_layers(config, part)) for part in stage.layers) / layers
    tokens = config.train.micro_batch_size * config.data.seq_length // parallel.cp
    hidden = tokens * value * architecture["hidden_size"]
    # calls of a layer in its forward and backward pass, and in the forward pass that recomputation repeats;
    # four run beside products anyway, the others overlapped wait for barriers alone
    gather = _exchange(hidden, parallel.tp, 1)
    waited = min(gather, parallel.tp * LATENCY) if parallel.tp_comm_overlap else gather
    seconds = (6 + 4 * again) * waited + 4 * (1 - BESIDE) * gather
    routed = hidden // parallel.tp * architecture.get("moe_router_topk", 0)
    seconds += (4 + 2 * again) * _exchange(routed, parallel.ep, 1)
    all_heads = [heads_of(architecture, layer) for layer in range(architecture["num_layers"])]
    keys = 2 * tokens * value * max(heads.groups * heads.channels for heads in all_heads) // parallel.tp
    seconds += (2 + again) * _exchange(keys * (parallel.cp - 1), parallel.cp, parallel.tp)
    return layers * seconds


def _exchange(nbytes: float, ranks: int, apart: int) -> float:
    """Seconds of an exchange among ranks whose numbers are so far apart."""
    if ranks == 1:
        return 0.0
    bandwidth = LINK if (ranks - 1) * apart < NODE else NETWORK
    return LATENCY + (ranks - 1) / ranks * nbytes / bandwidth
