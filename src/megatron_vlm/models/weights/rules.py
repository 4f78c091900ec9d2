"""How HF tensors make up a parameter of `VLMModel`, how tensor parallelism cuts it, and by what names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Slices(Protocol):
    """A tensor on disk: `source[a:b]` reads only that part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class Operation:
    """How one parameter holds one or several HF tensors, and how tensor parallelism cuts them."""

    axis: int | None  # along it, each rank holds an equal part of the HF tensors; None: each holds all

    def views(self, param: Tensor) -> list[list[Tensor]]:
        """This rank's part of each HF tensor, as views of its parameter: one of each block of the tensor, of
        which ranks hold equal parts. If `param` interleaves blocks, the rows of a view take two axes.
        """
        return [[param]]

    def blocks(self, rows: int) -> list[int]:
        """The sizes of the blocks of an HF tensor that has so many rows, or columns, along `axis`."""
        return [rows]

    def hf_shapes(self, param: Tensor, size: int) -> list[list[int]]:
        """The shapes of the whole HF tensors; `param` holds the part of one of `size` ranks."""
        shapes = []
        for views in self.views(param):
            rows = [math.prod(view.shape[: view.dim() - param.dim() + 1]) for view in views]
            shape = [sum(rows), *param.shape[1:]] if param.dim() else []
            if self.axis is not None:
                shape[self.axis] *= size
            shapes.append(shape)
        return shapes

    def load(self, param: Tensor, sources: Sequence[Slices | FusedRow], rank: int, size: int) -> None:
        """Fill this rank's `param`, reading its part of the HF tensors; casts to its dtype and device."""
        shapes = self.hf_shapes(param, size)
        for views, source, shape in zip(self.views(param), sources, shapes, strict=True):
            part = self.part(source, shape, rank, size).to(param.device)
            for view, block in zip(views, self.in_blocks(part, shape, size), strict=True):
                view.copy_(block.reshape(view.shape))  # a transposed one is turned on the device

    def join(self, shards: list[Tensor]) -> list[Tensor]:
        """The whole HF tensors from all ranks' parameters."""
        if self.axis is None:
            return shards[:1]
        size, shapes = len(shards), self.hf_shapes(shards[0], len(shards))
        tensors = [shards[0].new_empty(shape) for shape in shapes]
        for rank, shard in enumerate(shards):
            for views, tensor, shape in zip(self.views(shard), tensors, shapes, strict=True):
                for view, block in zip(views, self.in_blocks(tensor, shape), strict=True):
                    of_rank = block.unflatten(self.axis, (size, -1)).select(self.axis, rank)
                    of_rank.view(view.shape).copy_(view)
        return tensors

    def part(self, source: Slices | FusedRow, shape: list[int], rank: int, size: int) -> Tensor:
        """The part that a rank holds of a whole tensor of this shape, which is cut as the weight is."""
        if self.axis is None:
            return source[...]
        before, start, parts = (slice(None),) * self.axis, 0, []
        for block in self.blocks(shape[self.axis]):
            first = start + rank * (block // size)
            parts.append(source[(*before, slice(first, first + block // size))])
            start += block
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def in_blocks(self, tensor: Tensor, shape: list[int], size: int = 1) -> Sequence[Tensor]:
        """The blocks of what one of `size` ranks holds of an HF tensor of this shape."""
        blocks = [] if self.axis is None else self.blocks(shape[self.axis])
        if len(blocks) < 2:  # a part of a vocabulary may have more rows than its share
            return [tensor]
        return tensor.split([block // size for block in blocks], dim=self.axis)


@dataclass(frozen=True)
class Whole(Operation):
    """A tensor that is whole on every rank."""

    axis: ClassVar[None] = None


@dataclass(frozen=True)
class Cut(Operation):
    """A tensor cut into equal parts along `axis`."""

    axis: int


@dataclass(frozen=True)
class Vocabulary(Operation):
    """Embedding, output layer, or both in one, which a checkpoint may store under two `keys`.

    Where tensor parallelism does not divide its `entries`, the parameters end in rows that count for nothing.
    """

    entries: int
    keys: int = 1
    axis: ClassVar[int] = 0

    def views(self, param: Tensor) -> list[list[Tensor]]:
        return [[param]] * self.keys

    def hf_shapes(self, param: Tensor, size: int) -> list[list[int]]:
        return [[self.entries, *param.shape[1:]]] * self.keys

    def join(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards)[: self.entries]] * self.keys

    def part(self, source: Slices | FusedRow, shape: list[int], rank: int, size: int) -> Tensor:
        rows_per_rank = -(-self.entries // size)
        start, stop = (min(edge * rows_per_rank, self.entries) for edge in (rank, rank + 1))
        rows = source[(slice(start, stop),)]
        return (
            torch.cat([rows, rows.new_zeros(rows_per_rank - len(rows), *shape[1:])])
            if len(rows) < rows_per_rank
            else rows
        )


@dataclass(frozen=True)
class GatedMLP(Operation):
    """Megatron's linear_fc1: on each rank its rows of gate, then its rows of up. `fused`: one HF tensor."""

    fused: bool = False
    axis: ClassVar[int] = 0

    def blocks(self, rows: int) -> list[int]:
        return [rows // 2] * 2 if self.fused else [rows]

    def views(self, param: Tensor) -> list[list[Tensor]]:
        gate, up = param.chunk(2)
        return [[gate, up]] if self.fused else [[gate], [up]]


@dataclass(frozen=True)
class GroupedQKV(Operation):
    """Megatron's linear_qkv: for each key/value group its query heads, its key head, any value head. With
    `gates`, each query head is followed by the rows of its gate, as in the HF tensor."""

    heads: int
    groups: int
    head_dim: int
    values: bool = True
    gates: bool = False
    axis: ClassVar[int] = 0

    def views(self, param: Tensor) -> list[list[Tensor]]:
        queries = self.heads // self.groups * self.head_dim * (1 + self.gates)
        sizes = [queries] + (1 + self.values) * [self.head_dim]
        return [[view] for view in param.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)]


@dataclass(frozen=True)
class DeltaInputs(Operation):
    """The rows of `GatedDeltaNet`'s input: for each key head its query, its key and its values, as in one HF
    tensor, then any `others` of the head, each of an HF tensor of its own."""

    heads: int  # of keys
    key: int  # rows of a key head in each part
    values: int
    others: tuple[int, ...] = ()
    axis: ClassVar[int] = 0

    def blocks(self, rows: int) -> list[int]:
        sizes = [self.heads * width for width in (self.key, self.key, self.values)]
        return sizes if rows == sum(sizes) else [rows]

    def views(self, param: Tensor) -> list[list[Tensor]]:
        sizes = [self.key, self.key, self.values, *self.others]
        query, key, value, *more = param.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        return [[query, key, value], *([other] for other in more)]


@dataclass(frozen=True)
class FusedRow:
    """One of `count` tensors that `source` fuses along its first axis: a block of rows, or an expert of this
    `shape`, which is turned if the source holds it transposed, as some checkpoints do."""

    source: Slices
    number: int
    count: int
    shape: tuple[int, int]

    def __getitem__(self, index: Any) -> Tensor:
        if (height := self.source.get_shape()[0] // self.count) > 1:
            return self.source[self.number * height : (self.number + 1) * height][index]
        row = self.source[self.number]
        return (row.t() if is_transposed(self.source.get_shape()[1:], self.shape) else row)[index]


def is_transposed(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of shape `stored` holds tensors of `shape` with their last two axes exchanged."""
    stored, shape = list(stored), list(shape)
    return stored != shape and stored == [*shape[:-2], *shape[:-3:-1]]


@dataclass(frozen=True)
class Rule:
    """`param` of VLMModel <-> `hf` tensors. `*` stands for a number, `**` for any rest of a name.

    `export=False` marks a copy of what another rule exports (tied output weights on the last stage).
    `rows` says that the only HF tensor fuses this number of parameters along its first axis, each of shape
    `row_shape`. The last `*` of `param`, which `hf` then lacks, is the index along that axis. With `block` it
    fuses as many blocks of rows, of which `param` is that one."""

    param: str
    hf: tuple[str, ...]
    operation: Operation
    export: bool = True
    rows: int | None = None
    row_shape: tuple[int, int] = (0, 0)
    block: int | None = None

    def hf_names(self, name: str) -> list[str] | None:
        """The HF tensors of parameter `name`; None if the rule does not fit it."""
        match = matches(self.param, name)
        return match and [_fill(hf, match.groups()) for hf in self.hf]

    def row(self, name: str) -> int | None:
        """The index of parameter `name` in the fused tensor; None if the rule fuses nothing."""
        if self.rows is None or self.block is not None:
            return self.block
        return int(matches(self.param, name).groups()[-1])

    def hf_shapes(self, param: Tensor, size: int) -> list[list[int]]:
        """The shapes that the HF tensors of `param` must have."""
        if self.rows is None:
            return self.operation.hf_shapes(param, size)
        fused = param[None] if self.block is None else param
        return [[self.rows * len(fused), *fused.shape[1:]]]

    def fits(self, stored: Sequence[int], needed: Sequence[int]) -> bool:
        return list(stored) == list(needed) or (self.rows is not None and is_transposed(stored, needed))

    def sources(self, name: str, stored: list[Slices]) -> Sequence[Slices | FusedRow]:
        """The tensors that the operation reads: the `stored` ones, or this parameter's row of a fused one."""
        if self.rows is None:
            return stored
        return [FusedRow(source, self.row(name), self.rows, self.row_shape) for source in stored]


def matches(wildcards: str, name: str) -> re.Match | None:
    return _compiled(wildcards).fullmatch(name)


@cache
def _compiled(wildcards: str) -> re.Pattern:
    return re.compile(re.escape(wildcards).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)"))


def _fill(wildcards: str, values: tuple[str, ...]) -> str:
    remaining = iter(values)
    return re.sub(r"\*\*|\*", lambda _: next(remaining), wildcards)


def find_rule(rules: list[Rule], name: str, files: Collection[str] = ()) -> tuple[Rule, list[str]]:
    """The rule for parameter `name` and its HF tensors.

    Several may fit, because checkpoints come in several layouts. Then: of the rules whose HF tensors are all
    in `files`, the one with the most tensors; else the first whose layout occurs in `files`; else the first.
    """
    fitting = [(rule, names) for rule in rules if (names := rule.hf_names(name))]
    if not fitting:
        raise LookupError(f"no weight rule for parameter {name}; add one to the family's list")
    complete = [pair for pair in fitting if all(key in files for key in pair[1])]
    of_layout = (pair for pair in fitting if any(matches(hf, key) for hf in pair[0].hf for key in files))
    return max(complete, key=lambda pair: len(pair[1]), default=None) or next(of_layout, fitting[0])


def find_weight(rules: list[Rule], key: str) -> tuple[Rule, str, int] | None:
    """The rule that makes a parameter of HF tensor `key`: with the parameter's name and which of its HF
    tensors it is; None if no rule does. Of a tensor that fuses experts, the name in `named_weights`."""
    for rule in rules:
        for place, hf in enumerate(rule.hf):
            if rule.export and (match := matches(hf, key)):
                param = rule.param if rule.rows is None else _NUMBER_OF_EXPERT.sub("", rule.param)
                return rule, _fill(param, match.groups()), place
    return None


@dataclass(frozen=True)
class WeightMap:
    """Where every tensor of one HF checkpoint belongs: what import and export know about a family."""

    model_type: str
    rules: list[Rule]
    tied: bool  # the output layer is the embedding
    renames: tuple[tuple[str, str], ...] = ()  # HF key prefixes found in the wild -> the hub's own
    carried: dict[str, str] = field(default_factory=dict)  # pattern of keys -> why they are not imported
    peft_experts: tuple[str, ...] = ()  # ends of modules' names that peft takes for experts

    def carries(self, key: str) -> bool:
        """Whether exports have this key as the source has it."""
        return any(matches(pattern, key) for pattern in self.carried)


ADAPTERS = "adapters."  # prefix of what is no weight of the checkpoint, see `models.adapters`
_LAYER = re.compile(r"(?<=^language_model\.decoder\.layers\.)\d+")
_STACKED = re.compile(r"(?<=\.mlp\.experts\.)(?=linear_fc[12]$)")  # all experts of a rank in one tensor
_NUMBER_OF_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\*\.")
EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+")


def named_weights(
    model: MegatronModule, value: Callable[[Tensor], Tensor | None] = lambda weight: weight
) -> Iterator[tuple[str, Tensor]]:
    """Gives `named_global_weights` with the experts of this rank in one tensor, as they are."""
    offsets = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.language_model.decoder.layers)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.startswith(ADAPTERS) or not torch.is_tensor(tensor) or (tensor := value(tensor)) is None:
            continue
        yield _LAYER.sub(lambda match: str(offsets[match[0]]), name), tensor


def named_global_weights(
    model: MegatronModule, value: Callable[[Tensor], Tensor | None] = lambda weight: weight
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a chunk but its adapters, each expert's as one of its own, a view.

    Layers and experts are numbered over the whole model. With `value`, what it makes of each parameter or
    buffer; None leaves it out.
    """
    for name, tensor in named_weights(model, value):
        yield from each_expert(model.config, name, tensor)


def each_expert(config: TransformerConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight of `named_weights` itself, or each expert's that is in it, numbered over the whole model."""
    if not _STACKED.search(name):
        yield name, tensor
        return
    first_expert = experts_per_rank(config) * parallel_state.get_expert_model_parallel_rank()
    for number, expert in enumerate(tensor, first_expert):
        yield _STACKED.sub(f"{number}.", name), expert


def experts_per_rank(config: TransformerConfig) -> int:
    return (config.num_moe_experts or 0) // config.expert_model_parallel_size
