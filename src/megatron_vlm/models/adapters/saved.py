"""Modules that are trained whole, next to adapters: peft's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_vlm.config import ConfigError
from megatron_vlm.config_rules.patterns import matching
from megatron_vlm.messages import printable, suggestion
from megatron_vlm.models.weights.exporting import hf_tensors
from megatron_vlm.models.weights.files import hub_name
from megatron_vlm.models.weights.rules import Rule, Vocabulary, WeightMap, find_weight, named_weights
from megatron_vlm.weight_files import FLOATS

PREFIX = "base_model.model."  # of all keys in peft's files


@dataclass(frozen=True)
class SavedModule:
    """A parameter or buffer of `VLMModel` in such a module, and its HF tensors: (hub's key, peft's key)."""

    rule: Rule
    keys: list[tuple[str, str]]
    shapes: list[list[int]]  # of the whole HF tensors


def outside_saved(names: list[str], modules: list[str]) -> list[str]:
    """The names that lie in none of `modules_to_save`: peft gives the others no adapter
    (`tuners_utils.check_target_module_exists`)."""
    inside = {found for name in names for found in matching(rf"(^|.*\.){name}($|\..*)", modules, "match")}
    return [name for name in modules if name not in inside]


def find_saved(
    names: list[str], modules: dict[str, nn.Module], weight_map: WeightMap
) -> dict[str, SavedModule]:
    """Name in `named_weights` -> what it is, of all in the modules that `names` are ends of.

    Raises ConfigError for a name that fits nothing, or a module that cannot be trained and written by itself.
    """
    if not names:
        return {}
    found = [name for name in modules if name and any(f".{name}".endswith(f".{end}") for end in names)]
    for end in names:
        if not any(f".{name}".endswith(f".{end}") for name in found):
            known = suggestion(end, sorted({name.rpartition(".")[2] for name in modules}))
            raise _refused(f"{printable(end)} fits no module of the model{known}")
    keys = {}
    for name in found:
        if outside := next((other for other in found if name.startswith(f"{other}.")), None):
            raise _refused(f"{name} lies in {outside}, which is trained whole; name one of them.")
        keys |= {f"{name}.{key}": list(value.shape) for key, value in modules[name].state_dict().items()}
    for name in modules:  # peft compares letters, not whole parts of names
        if name.endswith(tuple(names)) and name not in found:
            raise _refused(f"peft would take {name}, too, which ends alike; give longer or whole names.")
    placed: dict[str, tuple[Rule, dict[int, tuple[str, str]]]] = {}
    for key in keys:
        rule, weight, place = _place(key, weight_map)
        placed.setdefault(weight, (rule, {}))[1][place] = hub_name(key, weight_map.renames), key
    for rule, parts in placed.values():
        if len(parts) < len(rule.hf):
            missing = ", ".join(hf for place, hf in enumerate(rule.hf) if place not in parts)
            given = next(iter(parts.values()))[1]
            raise _refused(f"{given} is one parameter here with {missing}; name modules that hold them all.")
    return {
        weight: SavedModule(
            rule, [parts[i] for i in range(len(parts))], [keys[parts[i][1]] for i in range(len(parts))]
        )
        for weight, (rule, parts) in placed.items()
    }


def _place(key: str, weight_map: WeightMap) -> tuple[Rule, str, int]:
    hub = hub_name(key, weight_map.renames)
    if weight_map.tied and any(
        isinstance(rule.operation, Vocabulary) and hub in rule.hf for rule in weight_map.rules
    ):
        raise _refused(
            f"{key} is both embedding and output layer of this model; peft would make two of them, and here "
            "they are one."
        )
    place = find_weight(weight_map.rules, hub)
    if place is None:
        raise _refused(f"{key} is not a part of the model that is trained; leave its module out.")
    if place[0].rows is not None:
        raise _refused(f"{key} holds routed experts; give them adapters by adapter.target_parameters.")
    return place


def _refused(why: str) -> ConfigError:
    return ConfigError(f"adapter.modules_to_save: {why}")


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
    held = {id(weight) for chunk in chunks for _, weight in saved_weights(chunk)}
    keys = dict(pair for one in saved.values() for pair in one.keys)
    rules = [one.rule for one in saved.values()]
    chosen = hf_tensors(chunks, rules, value=lambda weight: value(weight) if id(weight) in held else None)
    yield from ((PREFIX + keys[hub], tensor) for hub, tensor in chosen)


@torch.no_grad()
def fill_saved(chunk: MegatronModule, stored: Any) -> None:
    """Reads this rank's part from a safetensors file of peft, whose keys are those wanted. Raises ValueError
    for a tensor of another shape, or with values that are not finite."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for one, weight in saved_weights(chunk):
        pairs = zip(one.keys, one.shapes, strict=True)
        sources = [sliced(stored, PREFIX + key, shape) for (_, key), shape in pairs]
        one.rule.operation.load(weight, sources, rank, size)
        check_finite(PREFIX + one.keys[0][1], weight)


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
    held = {id(weight) for _, weight in saved_weights(chunk)}
    if not held:
        return {}
    # each layer by a name of its own: else all layers are one tensor, of which no part may be missing
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {key: entry for key, entry in state.items() if id(getattr(entry, "data", None)) in held}
