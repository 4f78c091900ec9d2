"""Modules that are trained whole, next to adapters: peft's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_vlm.models.weights.exporting import hf_tensors
from megatron_vlm.models.weights.rules import Rule, named_weights
from megatron_vlm.weight_files import FLOATS

PREFIX = "base_model.model."  # of all keys in peft's files


@dataclass(frozen=True)
class SavedModule:
    """A parameter or buffer of `VLMModel` in such a module, and its HF tensors, in the order of its rule."""

    rule: Rule
    keys: list[str]  # in Transformers' model
    shapes: list[list[int]]  # whole


def saved_weights(chunk: MegatronModule) -> Iterator[tuple[SavedModule, Tensor]]:
    """The weights in a chunk of modules that are trained whole."""
    saved = chunk.adapters.saved
    return ((saved[name], weight) for name, weight in named_weights(chunk) if name in saved)


def saved_tensors(
    chunks: list[MegatronModule], value: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """(peft's key, whole tensor) of this pipeline stage on every rank, see `hf_tensors`."""
    if not (saved := chunks[0].adapters.saved):
        return
    trained = {id(weight) for chunk in chunks for _, weight in saved_weights(chunk)}
    keys = {}
    for weight, one in saved.items():
        keys |= zip(one.rule.hf_names(weight), one.keys, strict=True)
    rules = [one.rule for one in saved.values()]
    tensors = hf_tensors(chunks, rules, value=lambda weight: value(weight) if id(weight) in trained else None)
    yield from ((PREFIX + keys[hub], tensor) for hub, tensor in tensors)


@torch.no_grad()
def fill_saved(chunk: MegatronModule, stored: Any) -> None:
    """Reads this rank's part from a safetensors file of peft, whose keys are those wanted. Raises ValueError
    for a tensor of another shape, or with values that are not finite."""
    group = parallel_state.get_tensor_model_parallel_group()
    for one, weight in saved_weights(chunk):
        pairs = zip(one.keys, one.shapes, strict=True)
        sources = [sliced(stored, PREFIX + key, shape) for key, shape in pairs]
        one.rule.operation.load(weight, sources, group.rank(), group.size())
        check_finite(PREFIX + one.keys[0], weight)


def sliced(stored: Any, key: str, shape: list[int]) -> Any:
    """A tensor of a file, to be read in parts. Raises ValueError unless it is floats of this shape."""
    values = stored.get_slice(key)
    if list(values.get_shape()) != shape or values.get_dtype() not in FLOATS:
        kind = f"{values.get_shape()} of {values.get_dtype()}"
        raise ValueError(f"{key} is {kind} and must be floats of shape {shape}; is it of another base model?")
    return values


def check_finite(key: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{key} holds values that are not finite.")


def sharded_saved(chunk: MegatronModule) -> dict[str, Any]:
    """Their state for a checkpoint: Megatron's own entries of the chunk, these alone."""
    trained = {id(weight) for _, weight in saved_weights(chunk)}
    if not trained:
        return {}
    # each layer by a name of its own: else all layers are one tensor, of which no part may be missing
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {key: entry for key, entry in state.items() if id(getattr(entry, "data", None)) in trained}
