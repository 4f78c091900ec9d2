"""How a parameter of `VLMModel` is made of HF tensors and cut by tensor parallelism, and by what name."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from megatron_vlm.models.vlm import VLMModel

# --- operations ------------------------------------------------------------------------------------------


class Slices(Protocol):
    """A tensor on disk: `source[a:b]` reads only that part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class Operation(Protocol):
    """How a parameter is cut over the `size` ranks of the tensor-parallel group."""

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        """This rank's parameter from the HF tensors."""

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        """The HF tensors from all ranks' parameters."""


@dataclass(frozen=True)
class Whole:
    """The same on every rank."""

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        return sources[0][...]

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Shard:
    """Equal parts along `axis`."""

    axis: int

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        return _part(sources[0], self.axis, rank, size)

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards, dim=self.axis)]


@dataclass(frozen=True)
class GatedMLP:
    """Megatron's linear_fc1: on each rank its rows of gate, then its rows of up."""

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        return torch.cat([_part(source, 0, rank, size) for source in sources])

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]


@dataclass(frozen=True)
class GroupedQKV:
    """Megatron's linear_qkv: for each key/value group its query heads, its key head, its value head."""

    heads: int
    groups: int
    head_dim: int

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        groups = self.groups // size
        parts = [_part(source, 0, rank, size) for source in sources]
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        grouped = torch.cat(shards).unflatten(0, (self.groups, -1))
        sizes = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


@dataclass(frozen=True)
class FusedGatedMLP:
    """linear_fc1 from one HF tensor that holds all rows of gate, then all rows of up."""

    def read(self, sources: list[Slices], rank: int, size: int) -> Tensor:
        return torch.cat([_part(sources[0], 0, half * size + rank, 2 * size) for half in range(2)])

    def write(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(GatedMLP().write(shards))]


def _part(source: Slices, axis: int, rank: int, size: int) -> Tensor:
    length = source.get_shape()[axis]
    if length % size:
        raise ValueError(f"axis {axis} of length {length} is not divisible by {size}")
    step = length // size
    return source[(slice(None),) * axis + (slice(rank * step, (rank + 1) * step),)]


@dataclass(frozen=True)
class Row:
    """One of the tensors that `source` holds along its first axis: one expert of a fused tensor.

    `shape` is that tensor's; a source that holds it transposed, as some checkpoints do, is turned.
    """

    source: Slices
    number: int
    shape: tuple[int, int]

    @property
    def turned(self) -> bool:
        return turned(self.source.get_shape(), self.shape)

    def get_shape(self) -> list[int]:
        rows, columns = self.source.get_shape()[1:]
        return [columns, rows] if self.turned else [rows, columns]

    def __getitem__(self, index: Any) -> Tensor:
        index = (*index, slice(None))[:2] if isinstance(index, tuple) else (slice(None), slice(None))
        if self.turned:
            return self.source[(self.number, index[1], index[0])].t()
        return self.source[(self.number, *index)]


def turned(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of the `stored` shape holds ones of `shape` with their last two axes exchanged."""
    return tuple(stored[-2:]) != tuple(shape[-2:]) and tuple(stored[-2:]) == (shape[-1], shape[-2])


# --- rules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """`param` of VLMModel <-> `hf` tensors. `*` stands for a number, `**` for any rest of a name.

    `export=False` marks a copy of what another rule exports (tied output weights on the last stage).
    `rows` says that the one HF tensor fuses as many parameters as this, each of shape `row_shape`: the last
    `*` of `param`, which `hf` then lacks, counts along its first axis.
    """

    param: str
    hf: tuple[str, ...]
    operation: Operation
    export: bool = True
    rows: int | None = None
    row_shape: tuple[int, int] = (0, 0)

    def hf_names(self, name: str) -> list[str] | None:
        """The HF tensors of parameter `name`, None when the rule is not about it."""
        match = matches(self.param, name)
        return match and [_fill(hf, match.groups()) for hf in self.hf]

    def row(self, name: str) -> int:
        """Which of the fused tensors parameter `name` is."""
        return int(matches(self.param, name).groups()[-1])

    def sources(self, name: str, stored: list[Slices]) -> list[Slices]:
        """What the operation reads: the `stored` HF tensors, or this parameter's row of the fused one."""
        if self.rows is None:
            return stored
        return [Row(source, self.row(name), self.row_shape) for source in stored]

    def covers(self, key: str) -> bool:
        return any(matches(hf, key) for hf in self.hf)


def matches(wildcards: str, name: str) -> re.Match | None:
    return re.fullmatch(re.escape(wildcards).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)"), name)


def _fill(wildcards: str, values: tuple[str, ...]) -> str:
    remaining = iter(values)
    return re.sub(r"\*\*|\*", lambda _: next(remaining), wildcards)


def find_rule(rules: list[Rule], name: str, files: Container[str] | None = None) -> tuple[Rule, list[str]]:
    """The rule for parameter `name` and its HF tensors.

    Where several fit, because checkpoints come in several layouts, it is the first all of whose HF tensors
    are in `files`, or else the first.
    """
    found = [(rule, names) for rule in rules if (names := rule.hf_names(name))]
    if not found:
        raise LookupError(f"no weight rule for parameter {name}; add one to the family's list")
    complete = (pair for pair in found if files is not None and all(key in files for key in pair[1]))
    return next(complete, found[0])


_LAYER = re.compile(r"(?<=^language_model\.decoder\.layers\.)\d+")
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def named_global_weights(model: VLMModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of one model chunk, layers and experts numbered over the model."""
    offsets = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.language_model.decoder.layers)}
    first_expert = experts_per_rank(model.config) * parallel_state.get_expert_model_parallel_rank()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(tensor):
            name = _LAYER.sub(lambda match: str(offsets[match[0]]), name)
            yield EXPERT.sub(lambda match: str(first_expert + int(match[0])), name), tensor


def experts_per_rank(config: TransformerConfig) -> int:
    return (config.num_moe_experts or 0) // config.expert_model_parallel_size
