"""The adapters of a whole model, `VLMModel.adapters`: beside its weights, by the names of Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor, nn

from megatron_vlm.models.adapters.lora import Adapted, Lora, adapt
from megatron_vlm.models.adapters.targets import Target
from megatron_vlm.models.weights import ADAPTERS, named_global_weights


class Adapters(nn.Module):
    """Modules nested like those of the HF model, `adapters.model.language_model.layers.0.self_attn.q_proj`
    with the parameters `lora_A` and `lora_B`; `linears` are the linears of ours that they belong to.
    `targets` are those of the whole model; `base` is the fingerprint of the checkpoint that they adapt."""

    def __init__(self, targets: list[Target]):
        super().__init__()
        self.targets, self.base = targets, ""
        self.linears: list[Adapted] = []
        self.of_vision = False  # whether any belongs to tower or projector

    @property
    def fingerprint(self) -> str:
        """It differs if modules, ranks or scales do."""
        known = [[target.module, target.rank, target.scale, target.dora] for target in self.targets]
        return xxhash.xxh3_64_hexdigest(json.dumps(sorted(known)).encode())

    def place(self, module: str, lora: Lora) -> None:
        *path, last = module.split(".")
        node: nn.Module = self
        for name in path:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node._modules[name]
        node.add_module(last, lora)


def add_adapters(chunk: MegatronModule, targets: list[Target], dropout: float, seed: int) -> None:
    """Freezes a chunk of the model and adds the adapters of those `targets` that it holds."""
    chunk.requires_grad_(False)
    owners = {id(param): module for module in chunk.modules() for param in module.parameters(recurse=False)}
    chunk.adapters = Adapters(targets)
    by_weight: dict[str, list[Target]] = {}
    for target in targets:
        by_weight.setdefault(target.weight, []).append(target)
    for name, weight in named_global_weights(chunk):
        if mine := by_weight.get(name):
            chunk.adapters.of_vision |= name.startswith("vision.")
            loras = {target.place: Lora(target, weight, seed) for target in mine}
            for target in mine:
                chunk.adapters.place(target.module, loras[target.place])
            chunk.adapters.linears.append(adapt(owners[id(weight)], loras, mine[0], dropout))


def named_adapters(chunk: MegatronModule) -> Iterator[tuple[str, Lora]]:
    """(name of the HF module, its adapter) of a chunk."""
    return ((name, part) for name, part in chunk.adapters.named_modules() if isinstance(part, Lora))


def adapter_tensors(
    chunks: list[MegatronModule], value: Callable[[Tensor], Tensor] = lambda weight: weight.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(peft's key, whole tensor) of this pipeline stage on every rank; `value` chooses what is gathered for a
    parameter. A collective over the tensor-parallel group: every rank of the stage iterates to the end."""
    group = parallel_state.get_tensor_model_parallel_group()
    for chunk in chunks:
        for module, lora in named_adapters(chunk):
            for name, axis in lora.axes.items():
                local = value(getattr(lora, name)).contiguous()
                shards = [local]
                if axis is not None and group.size() > 1:
                    shards = [torch.empty_like(local) for _ in range(group.size())]
                    dist.all_gather(shards, local, group=group)
                yield peft_key(module, name), torch.cat(shards, dim=axis or 0)


def peft_key(module: str, name: str) -> str:
    """The key in peft's files of an adapter's parameter."""
    return f"base_model.model.{module}.{name}" + ("" if name == "lora_magnitude_vector" else ".weight")


def sharded_state(chunk: MegatronModule) -> dict[str, ShardedTensor]:
    """What a checkpoint holds of a chunk with adapters, by names that are the same in every layout."""
    state = {}
    for module, lora in named_adapters(chunk):
        for name, axis in lora.axes.items():
            key, tensor = f"{ADAPTERS}{module}.{name}", getattr(lora, name)
            if axis is None:
                state[key] = make_sharded_tensor_for_checkpoint(tensor, key)
            else:
                state[key] = make_tp_sharded_tensor_for_checkpoint(tensor, key, tp_axis=axis)
    return state


@torch.no_grad()
def load_state(chunk: MegatronModule, state: dict[str, Tensor]) -> None:
    """Fills the adapters of a chunk from what was read for its `sharded_state`."""
    for module, lora in named_adapters(chunk):
        for name in lora.axes:
            getattr(lora, name).copy_(state[f"{ADAPTERS}{module}.{name}"])


@torch.no_grad()
def merge(chunk: MegatronModule) -> None:
    """Adds to each weight what its adapters stand for, in fp32. Then they must not be used with it."""
    for adapted in chunk.adapters.linears:
        weight = adapted.weight
        merged = weight.float() + adapted.B(torch.float32) @ adapted.A(torch.float32)
        weight.copy_(merged * adapted.factors()[:, None] if adapted.dora else merged)
