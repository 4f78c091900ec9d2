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
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def pipeline_layout(layers: int, pp: int, vpp: int) -> list[list[str]] | None:
    """What each pipeline stage holds, in the order tokens pass them; None where Megatron cuts evenly itself.

    Layers left over by an even cut go to the inner stages, then to the first: the first stage also holds
    embedding and tower, the last the output layer and its logits.
    """
    stages = pp * vpp
    base, rest = divmod(layers, stages)
    if not rest:
        return None
    favoured = [*range(1, stages - 1), 0, stages - 1][:rest]
    held = [["decoder"] * (base + (stage in favoured)) for stage in range(stages)]
    return [["embedding", *held[0]], *held[1:-1], [*held[-1], "loss"]]
