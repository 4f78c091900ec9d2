"""A layout in Megatron's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_vlm.config import ParallelConfig

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def megatron_settings(parallel: ParallelConfig) -> dict[str, int | bool | None]:
    """What a Megatron `TransformerConfig` must be told of this layout, as keyword arguments.

    With interleaved stages the point-to-point messages are sent one by one: in a batch, two stages that
    exchange activations and gradients with the same peer take one for the other (wrong losses, no error).
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
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def pipeline_layout(layers: int, parallel: ParallelConfig) -> list[list[str]]:
    """What each pipeline stage holds, in the order tokens pass them, as Megatron's config takes it.

    Layers left over by an even cut go to the inner stages, then to the first: the first stage also holds
    embedding and tower, the last the output layer and its logits.
    """
    stages = parallel.pp * parallel.vpp
    base, rest = divmod(layers, stages)
    favoured = [*range(1, stages - 1), 0, stages - 1][:rest]
    held = [["decoder"] * (base + (stage in favoured)) for stage in range(stages)]
    held[0].insert(0, "embedding")
    held[-1].append("loss")
    return held


def stage_layers(config: TransformerConfig, stage: int, vp_stage: int | None = None) -> range:
    """The layers of a pipeline stage, counted from 0 over the whole model."""
    layout = config.pipeline_model_parallel_layout
    first = layout.get_layer_offset(vp_stage=vp_stage, pp_rank=stage)
    return range(first, first + layout.get_num_layers_to_build(vp_stage=vp_stage, pp_rank=stage))
