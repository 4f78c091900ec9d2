"""The layouts of a run that fit by their plans, the quickest first."""

import itertools
from collections.abc import Iterator, Sequence

from megatron_vlm.config import RunConfig, derived
from megatron_vlm.extras.plan.plan import KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.recorder import Collective
from megatron_vlm.extras.plan.step_time import Gpu, collective_seconds
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES
from megatron_vlm.models.layers.attention_sizes import heads_of
from megatron_vlm.models.work import costs
from megatron_vlm.overrides import apply_overrides

SIZES = (1, 2, 4, 8, 16, 32)
# tokens of a row that context parallelism leaves a rank at least: shorter rows are cheaper on whole ranks
FEWEST_TOKENS = 8192
MOST_REHEARSED = 5
# how long a tower takes over its operations' own time: Transformers' layers are not fused (rehearsed: 1.8)
OF_TOWER = 2
# what a layout may change to fit, in this order: with Adam's state on the host, numbers stay the same to the
# bit; with gradients added up in bf16 they do not
AS_IT_IS = ((),)
TO_FIT = (
    *AS_IT_IS,
    ("optimizer.offload=true",),
    ("optimizer.reduce_in_fp32=false",),
    ("optimizer.offload=true", "optimizer.reduce_in_fp32=false"),
)


def planned_layouts(
    config: RunConfig,
    description: Description,
    gpus: int,
    capacity: float,
    gpu: Gpu,
    to_fit: Sequence[tuple[str, ...]] = AS_IT_IS,
    overlap: bool = False,
) -> list[tuple[tuple[str, ...], MemoryPlan]]:
    """Settings and plans of all layouts on `gpus` GPUs that need at most `capacity` bytes of each.

    They are in the order of an estimated step's time. tp stays inside a node, the batches as they are. Each
    layout comes with the first of the changes `to_fit` with which it fits. With `overlap`, all that split
    tensors have `parallel.tp_comm_overlap`.
    """
    known = KnownCosts()
    fitting = []
    for layout in _layouts(config, description, gpus, gpu, overlap):
        for settings in ((*layout, *change) for change in to_fit):
            try:
                plan = make_plan(apply_overrides(config, settings), description, gpus, known)
            except ValueError:
                continue  # it does not divide GPUs, model or batch
            if plan.memory <= capacity:
                fitting.append((planned_seconds(plan, gpu), settings, plan))
                break
    return [(settings, plan) for _, settings, plan in sorted(fitting, key=lambda each: each[0])]


def representatives(plan: MemoryPlan) -> list[int]:
    """The first ranks of the stages that differ: the first, the last, the fullest and the busiest."""
    pp = plan.config.parallel.pp
    busiest = max(range(pp), key=lambda stage: plan.stages[stage].flops)
    return [stage * plan.gpus // pp for stage in sorted({0, pp - 1, plan.fullest, busiest})]


def _layouts(
    config: RunConfig, description: Description, gpus: int, gpu: Gpu, overlap: bool
) -> Iterator[tuple[str, ...]]:
    experts = SIZES if "num_moe_experts" in description.architecture else (1,)
    sizes = itertools.product(SIZES, SIZES, SIZES, experts, (1, 2), ("none", "full"))
    for tp, pp, cp, ep, vpp, recompute in sizes:
        fits = tp <= gpu.per_node and gpus % (tp * pp * cp) == 0 and gpus % (pp * ep) == 0
        long = cp == 1 or config.data.seq_length // cp >= FEWEST_TOKENS
        if fits and long and (vpp == 1 or pp > 1):
            layout = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": vpp}
            overlaps = (f"parallel.tp_comm_overlap={str(tp > 1).lower()}",) if overlap else ()
            yield (
                *(f"parallel.{k}={v}" for k, v in layout.items()),
                *overlaps,
                f"model.recompute={recompute}",
            )


def planned_seconds(plan: MemoryPlan, gpu: Gpu) -> float:
    """An estimate of a step's time from the plan alone, good enough to choose what to rehearse."""
    parallel = plan.config.parallel
    architecture = plan.description.architecture
    images = plan.config.train.micro_batch_size * costs.images_per_tower(plan.config, plan.image)
    tower = costs.vision_passes(plan.config, plan.image) * images * plan.image.flops
    work = [stage.flops for stage in plan.stages]
    work[0] += (OF_TOWER - 1) * tower
    busiest = plan.stages[work.index(max(work))]
    micro_batches = derived(plan.config, plan.gpus)["micro_batches_per_step"]
    value = DTYPES[plan.config.model.dtype].itemsize
    again = plan.config.model.recompute == "full"
    tokens = plan.config.train.micro_batch_size * plan.config.data.seq_length // parallel.cp
    hidden = tokens * value * architecture["hidden_size"]
    layers = sum(map(len, busiest.layers))

    def call(kind: str, nbytes: float, size: int, apart: int) -> float:
        ranks = tuple(range(0, size * apart, apart))
        return collective_seconds(Collective("", kind, ranks, int(nbytes)), gpu)

    # calls of a layer in its forward and backward pass, and in the forward pass that recomputation repeats;
    # four run beside products anyway, the others overlapped wait for barriers alone
    calls = 6 + 4 * again
    gather = call("allgather", hidden, parallel.tp, 1)
    waited = calls * (min(gather, parallel.tp * gpu.latency) if parallel.tp_comm_overlap else gather)
    exchanged = layers * (waited + 4 * (1 - gpu.beside_share) * gather)
    routed = hidden // parallel.tp * architecture.get("moe_router_topk", 0)
    exchanged += layers * (4 + 2 * again) * call("alltoall", routed, parallel.ep, 1)
    all_heads = [heads_of(architecture, layer) for layer in range(architecture["num_layers"])]
    widest = max(heads.groups * heads.channels for heads in all_heads)
    keys = 2 * tokens * value * widest // parallel.tp
    exchanged += layers * (2 + again) * call("alltoall", keys * (parallel.cp - 1), parallel.cp, parallel.tp)
    shared = plan.gpus // (parallel.tp * parallel.pp)
    once = call("allgather", busiest.gradients + busiest.weights, shared, parallel.tp)
    once += 2 * busiest.host.get("what Adam keeps", 0) / gpu.host
    one = max(work) / (gpu.peak * gpu.matmul_share) + exchanged
    return one * (micro_batches + (parallel.pp - 1) / parallel.vpp) + once
