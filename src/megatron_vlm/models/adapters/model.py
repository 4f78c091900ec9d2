"""The adapters of a whole model, `VLMModel.adapters`: beside its weights, by the names of Transformers."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_vlm.models.adapters.lora import ExpertLora, Lora, LoRAExperts, LoRAHook
from megatron_vlm.models.adapters.targets import SavedModule, Target
from megatron_vlm.models.weights.exporting import gather, hf_tensors
from megatron_vlm.models.weights.rules import ADAPTERS, named_weights

PREFIX = "base_model.model."  # of all keys in peft's files


class Adapters(nn.Module):
    """Every `Lora` by its module's name in the HF model: `model.language_model.layers.0.self_attn.q_proj`.

    `linears` are the weights of ours that they belong to. `targets` and `saved`, what is trained whole, are
    of the whole model; `base` is the fingerprint of the checkpoint that they adapt.
    """

    def __init__(self, targets: list[Target], saved: dict[str, SavedModule]):
        super().__init__()
        self.targets, self.saved, self.base = targets, saved, ""
        self.linears: list[LoRAHook | LoRAExperts] = []
        self.of_vision = False  # whether any belongs to tower or projector

    @property
    def fingerprint(self) -> str:
        """It differs if modules, ranks or scales do."""
        identity = [[target.module, target.rank, target.scale, target.dora] for target in self.targets]
        identity += [[name] for name in self.saved]
        return xxhash.xxh3_64_hexdigest(json.dumps(sorted(identity)).encode())


def add_adapters(
    chunk: MegatronModule, targets: list[Target], saved: dict[str, SavedModule], dropout: float, seed: int
) -> None:
    """Freezes a chunk of the model but what is `saved`; adds the adapters of the `targets` that it holds."""
    chunk.requires_grad_(False)
    owners = {
        id(param): (module, name)
        for module in chunk.modules()
        for name, param in module.named_parameters(recurse=False)
    }
    chunk.adapters = Adapters(targets, saved)
    for _, weight in saved_weights(chunk):
        weight.requires_grad_(isinstance(weight, nn.Parameter) and not hasattr(weight, "unused"))
    by_weight: dict[str, list[Target]] = {}
    for target in targets:
        by_weight.setdefault(target.weight, []).append(target)
    for name, weight in named_weights(chunk):
        if weight_targets := by_weight.get(name):
            chunk.adapters.of_vision |= name.startswith("vision.")
            kind = ExpertLora if weight_targets[0].experts else Lora
            loras = {target.place: kind(target, weight, seed) for target in weight_targets}
            for target in weight_targets:
                chunk.adapters._modules[target.module] = loras[target.place]  # `add_module` takes no dots
                if hasattr(weight, "unused"):  # no feature depends on it, see `family_parts.towers`
                    loras[target.place].requires_grad_(False)
            module, own_name = owners[id(weight)]
            if weight_targets[0].experts:
                module.adapted[own_name] = adapted = LoRAExperts(weight, loras[0])
            else:
                adapted = LoRAHook(module, loras, weight_targets[0], dropout)
            chunk.adapters.linears.append(adapted)


def saved_weights(chunk: MegatronModule) -> Iterator[tuple[SavedModule, Tensor]]:
    """The weights in a chunk of modules that are trained whole."""
    saved = chunk.adapters.saved
    return ((saved[name], weight) for name, weight in named_weights(chunk) if name in saved)


def adapter_tensors(
    chunks: list[MegatronModule], value: Callable[[Tensor], Tensor] = lambda weight: weight.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(peft's key, whole tensor) of this pipeline stage on every rank, also of what is trained whole; `value`
    chooses what is gathered for a parameter. A collective over the tensor-parallel group, and the
    expert-parallel one for experts: every rank of the stage iterates to the end."""
    for chunk in chunks:
        for lora in chunk.adapters.children():
            for name, axis in lora.axes.items():
                local = value(getattr(lora, name))
                shards = [local] if axis is None else gather(local, lora.group)
                yield peft_key(lora.target, name), lora.as_in_peft(name, shards)
    yield from _saved_tensors(chunks, value)


def _saved_tensors(
    chunks: list[MegatronModule], value: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """(peft's key, whole tensor) of this pipeline stage on every rank, see `hf_tensors`."""
    if not (saved := chunks[0].adapters.saved):
        return
    trained = {id(weight) for chunk in chunks for _, weight in saved_weights(chunk)}
    keys = {}
    for weight, module in saved.items():
        keys |= zip(module.rule.hf_names(weight), module.keys, strict=True)
    rules = [module.rule for module in saved.values()]
    tensors = hf_tensors(chunks, rules, value=lambda weight: value(weight) if id(weight) in trained else None)
    yield from ((PREFIX + keys[hub], tensor) for hub, tensor in tensors)


def peft_key(target: Target, name: str) -> str:
    """The key in peft's files of an adapter's parameter."""
    suffix = "" if name == "lora_magnitude_vector" else ".weight"
    return f"{PREFIX}{target.stored or target.module}.{name}{suffix}"


def sharded_state(chunk: MegatronModule) -> dict[str, Any]:
    """The state of a chunk with adapters for a checkpoint, by names that are the same in every layout."""
    return _sharded_saved(chunk) | {
        f"{ADAPTERS}{lora.target.module}.{name}": lora.sharded(f"{ADAPTERS}{lora.target.module}.{name}", name)
        for lora in chunk.adapters.children()
        for name in lora.axes
    }


def _sharded_saved(chunk: MegatronModule) -> dict[str, Any]:
    """The state of what is trained whole: of Megatron's own entries of the chunk, these alone."""
    trained = {id(weight) for _, weight in saved_weights(chunk)}
    if not trained:
        return {}
    # each layer by a name of its own: else all layers are one tensor, of which no part may be missing
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {key: entry for key, entry in state.items() if id(getattr(entry, "data", None)) in trained}


@torch.no_grad()
def load_state(chunk: MegatronModule, state: dict[str, Any]) -> None:
    """Fills the adapters of a chunk from what was read for its `sharded_state`."""
    for name, parameter in chunk.adapters.named_parameters():
        parameter.copy_(state[ADAPTERS + name])
    chunk.load_state_dict({k: v for k, v in state.items() if not k.startswith(ADAPTERS)}, strict=False)


@torch.no_grad()
def merge(chunk: MegatronModule) -> None:
    """Adds to each weight what its adapters stand for, in fp32. Then they must not be used with it."""
    for adapted in chunk.adapters.linears:
        adapted.weight.copy_(adapted.merged())


def with_adapters(chunks: list[MegatronModule]) -> Callable[[Tensor], Tensor]:
    """A function of a weight: what `merge` would make of it, as a copy; the weight stays as it is."""
    by_weight = {id(adapted.weight): adapted for chunk in chunks for adapted in chunk.adapters.linears}
    return lambda weight: by_weight[id(weight)].merged() if id(weight) in by_weight else weight.detach()
