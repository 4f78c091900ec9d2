"""Whether a checkpoint's output layer is its embedding: the weights decide, as in Transformers."""

from pathlib import Path

import torch
from torch import distributed as dist

from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.rules import Vocabulary, WeightMap
from megatron_vlm.parallel.setup import on_first_rank
from megatron_vlm.weight_files import has_weights

ROWS = 4096  # rows of the two matrices that are compared at a time


def are_tied(weight_map: WeightMap, folder: Path) -> bool:
    """Whether the output layer is the embedding, as `PreTrainedModel.tie_weights` has it.

    It is if config.json asks for it (`weight_map.tied`), or leaves it to a default that does, unless both
    matrices are stored and differ. Without weights in the folder config.json decides alone. If processes have
    joined, one rank reads.
    """
    if weight_map.tied and has_weights(folder):
        if dist.is_initialized():
            return not on_first_rank(_stored_apart, weight_map, folder)
        return not _stored_apart(weight_map, folder)
    return weight_map.tied


def _stored_apart(weight_map: WeightMap, folder: Path) -> bool:
    """Whether both matrices are stored and differ."""
    checkpoint = HFCheckpoint(folder, weight_map.renames)
    stored = (rule.hf for rule in weight_map.rules if isinstance(rule.operation, Vocabulary))
    embedding, head = next(keys for keys in stored if len(keys) == 2)
    both = embedding in checkpoint.files and head in checkpoint.files
    return both and differ(checkpoint, embedding, head)


def differ(checkpoint: HFCheckpoint, embedding_key: str, head_key: str) -> bool:
    """Whether two matrices differ. Reads a few rows at a time, up to the first difference."""
    embedding, head = (checkpoint.slices(key) for key in (embedding_key, head_key))
    if list(embedding.get_shape()) != list(head.get_shape()):
        return True
    for start in range(0, embedding.get_shape()[0], ROWS):
        mine, theirs = (source[slice(start, start + ROWS),] for source in (embedding, head))
        if not torch.equal(mine, theirs.to(mine.dtype)):
            return True
        nbytes = mine.nbytes + theirs.nbytes
        del mine, theirs
        checkpoint.release(nbytes)
    return False
