"""A model's Hugging Face weights one after another, for an inference engine that is to have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.models.weights.exporting import hf_tensors
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.rules import WeightMap, turned
from megatron_vlm.parallel import setup

Named = tuple[str, Tensor]


def hf_weights(
    chunks: list[MegatronModule],
    source: str | Path,
    weight_map: WeightMap,
    value: Callable[[Tensor], Tensor | None] = torch.detach,
) -> Iterator[Named]:
    """(name, whole tensor) of every weight, stage after stage, on every rank: names, dtypes and layouts are
    as in the files in `source`, as an export has them. Fused experts come as one tensor.

    Collective over all ranks, which all iterate to the end. One weight is held at a time. `value` is as for
    `hf_tensors`.
    """
    checkpoint = HFCheckpoint(source, weight_map.renames)

    def as_stored(key: str, tensor: Tensor) -> Named:
        stored = checkpoint.stored(key)
        tensor = tensor.mT if turned(stored.shape, tensor.shape) else tensor
        return stored.name, tensor.to(stored.dtype)

    own = hf_tensors(chunks, weight_map.rules, checkpoint.files, value)
    return from_every_stage(as_stored(*weight) for weight in own)


def from_every_stage(own: Iterable[Named]) -> Iterator[Named]:
    """Yields what each pipeline stage has, one after another, on every rank's device. `own` may be a
    collective of its stage."""
    group, mine = parallel_state.get_pipeline_model_parallel_group(), dist.get_rank()
    for sender in dist.get_process_group_ranks(group):
        weights = iter(own) if sender == mine else iter(())
        while weight := _sent(next(weights, None), sender, group):
            yield weight


def _sent(weight: Named | None, sender: int, group: dist.ProcessGroup) -> Named | None:
    """The sender's weight on every rank of the group; None after its last."""
    if group.size() == 1:
        return weight and (weight[0], weight[1].contiguous())
    said = [weight and (weight[0], weight[1].shape, weight[1].dtype)]
    dist.broadcast_object_list(said, src=sender, group=group)
    if said[0] is None:
        return None
    name, shape, dtype = said[0]
    tensor = weight[1].contiguous() if weight else torch.empty(shape, dtype=dtype, device=setup.device())
    dist.broadcast(tensor, src=sender, group=group)
    return name, tensor
