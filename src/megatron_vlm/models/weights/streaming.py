"""A model's Hugging Face weights one after another, for an inference engine that is to have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.models.weights.exporting import hf_tensors
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.rules import WeightMap, turned


def hf_weights(
    chunks: list[MegatronModule], source: str | Path, weight_map: WeightMap
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every weight, stage after stage, on every rank: names, dtypes and layouts are
    those of the files in `source`, as an export has them. Fused experts come as one tensor.

    Collective over all ranks, which all iterate to the end. One weight is held at a time.
    """
    checkpoint, device = HFCheckpoint(source, weight_map.renames), next(chunks[0].parameters()).device
    group, mine = parallel_state.get_pipeline_model_parallel_group(), dist.get_rank()
    for sender in dist.get_process_group_ranks(group):
        own = hf_tensors(chunks, weight_map.rules, checkpoint.files) if sender == mine else iter(())
        while weight := _sent(next(own, None), checkpoint, sender, group, device):
            yield weight


def _sent(
    weight: tuple[str, Tensor] | None,
    checkpoint: HFCheckpoint,
    sender: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[str, Tensor] | None:
    """The sender's weight on every rank of the group; None after its last."""
    key = [weight and weight[0]]
    if group.size() > 1:
        dist.broadcast_object_list(key, src=sender, group=group)
    if key[0] is None:
        return None
    stored = checkpoint.stored(key[0])
    if weight is None:
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    else:
        tensor = weight[1].mT if turned(stored.shape, weight[1].shape) else weight[1]
        tensor = tensor.to(stored.dtype).contiguous()
    if group.size() > 1:
        dist.broadcast(tensor, src=sender, group=group)
    return stored.name, tensor
