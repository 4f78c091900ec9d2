"""A layout in Megatron's words."""

from __future__ import annotations

from megatron_vlm.config import ParallelConfig


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
        "sequence_parallel": parallel.sequence_parallel,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
