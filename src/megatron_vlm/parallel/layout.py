"""A run's parallel layout as Megatron's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_vlm.config import ParallelConfig

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def megatron_settings(parallel: ParallelConfig) -> dict[str, int | bool | None]:
    """The keyword arguments of a Megatron `TransformerConfig` for this layout.

    With interleaved stages the point-to-point messages are sent one by one: in a batch, two stages that
    exchange activations and gradients with the same peer mix them up (wrong losses, no error). With
    `batch_p2p_sync` the host would wait for the device after each batch, as older versions of torch need.
    """
    interleaved = parallel.vpp > 1
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel,
        "tp_comm_overlap": parallel.tp_comm_overlap,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": False,
    }


def pipeline_layout(layers: int, first: float, last: float, parallel: ParallelConfig) -> list[list[str]]:
    """The parts that each pipeline stage holds, in the order in which tokens pass them, for Megatron.

    `first` and `last` are the work of the tower and of the output layer, in layers. Each stage starts with
    one layer. Each further layer goes to the rank with the least work, and there to its lightest stage. So
    the busiest rank has as little work as layers of equal work allow. There are no more stages than layers.
    """
    stages = parallel.pp * parallel.vpp
    layer_counts, extra = [1] * stages, [first] + [0.0] * (stages - 2) + [last]

    def work(stage: int) -> tuple[float, float]:
        of_rank = range(stage % parallel.pp, stages, parallel.pp)
        return sum(layer_counts[s] + extra[s] for s in of_rank), layer_counts[stage] + extra[stage]

    if stages == 1:
        layer_counts = [layers]
    for _ in range(layers - sum(layer_counts)):
        layer_counts[min(range(stages), key=work)] += 1
    layout = [["decoder"] * count for count in layer_counts]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def stage_layers(config: TransformerConfig, stage: int, vp_stage: int | None = None) -> range:
    """The layers of a pipeline stage, counted from 0 over the whole model.

    Megatron's own functions ask the process groups whether there are virtual stages: without them, in a plan,
    each would be the first.
    """
    by_rank = config.pipeline_model_parallel_layout.layout
    counts = [
        sum(part.name == "decoder" for part in parts)
        for of_all_ranks in zip(*by_rank, strict=True)
        for parts in of_all_ranks
    ]
    place = (vp_stage or 0) * len(by_rank) + stage
    return range(sum(counts[:place]), sum(counts[: place + 1]))
