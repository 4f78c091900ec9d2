"""How long a step would take on a GPU, from what a rehearsal counted: a simple model, stated in `Gpu`.

An operation takes as long as its arithmetic or its traffic with memory, whichever is longer; a collective its
latency and its bytes over the slowest link, by the ring algorithm. Functions that CUDA runs compiled
(`models.layers.kernels.fused`) count as what their kernels read and write. Nothing else is fused. All stages
take as long as the slowest. What overlaps is what the code overlaps, see `hidden_time`, and the reduction of
gradients with the last backward (gathering parameters overlaps in a run, too).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.config import derived
from megatron_vlm.extras.plan.recorder import Collective, DeviceWork, Overlap, Seen
from megatron_vlm.extras.plan.rehearsal import Rehearsal


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links; the defaults are an H100 SXM's (its data sheet) in nodes of eight with a 400 Gb/s
    network card each. The shares say how much of a peak code reaches; they are assumptions."""

    peak: float = 989e12  # operations a second of bf16 products of matrices
    memory: float = 3.35e12  # bytes a second
    link: float = 450e9  # bytes a second to other GPUs of the node, each way
    network: float = 50e9  # likewise, to other nodes
    per_node: int = 8
    matmul_share: float = 0.7
    attention_share: float = 0.5
    memory_share: float = 0.8
    link_share: float = 0.8
    host: float = 50e9  # bytes a second to the host's memory, and from it
    beside_share: float = 0.85  # of its speed that a product keeps while NCCL's kernels run beside it
    launch: float = 3e-6  # seconds that the smallest operation takes
    latency: float = 20e-6  # seconds that the smallest collective takes


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    computing: float  # of the busiest stage
    exchanging: float
    bubble: float  # waiting for other stages
    once: float  # reducing gradients and the optimizer
    utilisation: float  # of the peak, by the operations that the model needs: recomputed ones do not count

    @property
    def seconds(self) -> float:
        return self.computing + self.exchanging + self.bubble + self.once


def step_time(rehearsals: Sequence[Rehearsal], gpu: Gpu, useful_flops: float) -> StepTime:
    """The step's time from rehearsals of ranks of one layout, the busiest stage among them.

    `useful_flops` is the work of a step on all GPUs.
    """
    config = rehearsals[0].config
    gpus = rehearsals[0].gpus
    computing, exchanging = max(
        ((computing_time(one.micro_batch, gpu), exchanging_time(one.micro_batch, gpu)) for one in rehearsals),
        key=sum,
    )
    micro_batches = derived(config, gpus)["micro_batches_per_step"]
    waiting = (config.parallel.pp - 1) / config.parallel.vpp  # micro batches; arXiv 2104.04473
    once = max(_once(one, gpu) for one in rehearsals)
    seconds = (computing + exchanging) * (micro_batches + waiting) + once
    return StepTime(
        computing=computing * micro_batches,
        exchanging=exchanging * micro_batches,
        bubble=(computing + exchanging) * waiting,
        once=once,
        utilisation=useful_flops / (seconds * gpus * gpu.peak),
    )


def _once(one: Rehearsal, gpu: Gpu) -> float:
    """Seconds of what a step does once. The last backward, two thirds of a micro batch, hides some of the
    reduction."""
    calls = one.once.of(Collective).items()
    reduction = Seen({call: n for call, n in calls if call.group == "dp" and "reduce" in call.kind})
    hidden = min(exchanging_time(reduction, gpu), computing_time(one.micro_batch, gpu) * 2 / 3)
    offloaded = 2 * one.offloaded / gpu.host
    return computing_time(one.once, gpu) + exchanging_time(one.once, gpu) + offloaded - hidden


def computing_time(seen: Seen, gpu: Gpu) -> float:
    return sum(count * _seconds(work, gpu) for work, count in seen.of(DeviceWork).items())


def _seconds(work: DeviceWork, gpu: Gpu) -> float:
    share = gpu.attention_share if work.kind == "attention" else gpu.matmul_share
    arithmetic = work.flops / (gpu.peak * share)
    return max(arithmetic, work.nbytes / (gpu.memory * gpu.memory_share), gpu.launch)


def exchanging_time(seen: Seen, gpu: Gpu) -> float:
    """Seconds that a rank waits for collectives."""
    whole = sum(count * collective_seconds(call, gpu) for call, count in seen.of(Collective).items())
    return whole - sum(count * hidden_time(overlap, gpu) for overlap, count in seen.of(Overlap).items())


def hidden_time(overlap: Overlap, gpu: Gpu) -> float:
    """Seconds of a collective in which its rank works on a product.

    Megatron's linears start two collectives of the backward pass beside products
    (`LinearWithGradAccumulationAndAsyncCommunication`; `CUDA_DEVICE_MAX_CONNECTIONS` is 1, so that they start
    first). NCCL's kernels take some of the multiprocessors meanwhile.

    torch's operators for `tp_comm_overlap` make as many pieces as there are ranks. One piece needs no
    exchange and is multiplied beside the first copy; then each is multiplied beside the next copy, and a
    barrier goes before each copy (`_pipelined_multi_all_gather_and_consume` and
    `_pipelined_produce_and_all2all` in torch/distributed/_symmetric_memory). The first barrier is the
    collective's own latency. It is assumed that copies are as fast as NCCL's and take nothing from products,
    and that a piece is multiplied as fast as the whole.
    """
    whole = collective_seconds(overlap.call, gpu)
    product = _seconds(overlap.product, gpu)
    if overlap.pieces == 1:
        return min(gpu.beside_share * whole, product)
    hidden = min(whole - gpu.latency, product * (1 - 1 / overlap.pieces))
    return hidden - (overlap.pieces - 2) * gpu.latency


def collective_seconds(call: Collective, gpu: Gpu) -> float:
    """Seconds by the ring algorithm, over the network if the group's ranks are on several nodes."""
    ranks = len(call.ranks)
    if ranks == 1:
        return 0.0
    inside = len({rank // gpu.per_node for rank in call.ranks}) == 1
    bandwidth = gpu.link_share * (gpu.link if inside else gpu.network)
    times = 1.0 if call.kind == "send" else (ranks - 1) / ranks
    times *= 2 if call.kind.startswith("allreduce") else 1
    return gpu.latency + times * call.nbytes / bandwidth
