"""Hugging Face weights in and out, by one list of rules per family played in both directions.

A rule pairs a parameter of `VLMModel` with the HF tensors it is made of, and an operation that knows how
tensor parallelism cuts it. Import reads, from safetensors, only the slices that this rank holds; export
gathers one parameter at a time. Layer and expert numbers are global on both sides.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub import snapshot_download
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

if TYPE_CHECKING:
    from megatron_vlm.models.families.base import Family
    from megatron_vlm.models.vlm import VLMModel

WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
SCALE = "_scale_inv"  # of an FP8 tensor: its key and this
SHARD_BYTES = 2**30  # export starts a new file after this much


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
        match = re.fullmatch(_pattern(self.param), name)
        return match and [_fill(hf, match.groups()) for hf in self.hf]

    def row(self, name: str) -> int:
        """Which of the fused tensors parameter `name` is."""
        return int(re.fullmatch(_pattern(self.param), name).groups()[-1])

    def sources(self, name: str, stored: list[Slices]) -> list[Slices]:
        """What the operation reads: the `stored` HF tensors, or this parameter's row of the fused one."""
        if self.rows is None:
            return stored
        return [Row(source, self.row(name), self.row_shape) for source in stored]

    def covers(self, key: str) -> bool:
        return any(re.fullmatch(_pattern(hf), key) for hf in self.hf)


def _pattern(wildcards: str) -> str:
    return re.escape(wildcards).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)")


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
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def named_global_weights(model: VLMModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of one model chunk, layers and experts numbered over the model."""
    offsets = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.language_model.decoder.layers)}
    first_expert = _experts_per_rank(model.config) * parallel_state.get_expert_model_parallel_rank()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(tensor):
            name = _LAYER.sub(lambda match: str(offsets[match[0]]), name)
            yield _EXPERT.sub(lambda match: str(first_expert + int(match[0])), name), tensor


def _experts_per_rank(config: TransformerConfig) -> int:
    return (config.num_moe_experts or 0) // config.expert_model_parallel_size


# --- checkpoints on disk ---------------------------------------------------------------------------------


def hub_name(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    """`key` as the hub's files spell it, from any of the spellings found in the wild or in memory."""
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


class Dequantised:
    """An FP8 tensor on disk times its scale, in fp32, read slice by slice.

    `scale` is one number or a grid of one number per block, where blocks are equal parts of each axis.
    """

    def __init__(self, values: Slices, scale: Tensor):
        self._values, shape = values, values.get_shape()
        self._scale = (scale if scale.dim() == len(shape) else scale.reshape([1] * len(shape))).float()
        if any(length % blocks for length, blocks in zip(shape, self._scale.shape, strict=True)):
            raise ValueError(f"FP8 tensor of shape {shape} is not divisible by its scales {[*scale.shape]}")

    def get_shape(self) -> list[int]:
        return self._values.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        parts = () if index is Ellipsis else index
        scale = self._scale
        for axis, length in enumerate(self.get_shape()):
            block_of = torch.arange(length) // (length // scale.shape[axis])
            scale = scale.index_select(axis, block_of[parts[axis]] if axis < len(parts) else block_of)
        return self._values[index].float() * scale


class HFCheckpoint:
    """The safetensors of an HF folder (or hub name), by hub key whatever prefixes the files use.

    FP8 weights with scales (`weight_scale_inv`, one per tensor or per block) read as what they stand for; the
    scales, also those of activations, are no keys of their own.
    """

    def __init__(self, path: str | Path, renames: tuple[tuple[str, str], ...] = ()):
        self.folder = resolve(path)
        self._renames = renames
        self._open: dict[str, Any] = {}

    @cached_property
    def files(self) -> dict[str, tuple[str, str]]:
        """hub key -> (file, key in that file)."""
        scales = {key for key in self._all_files if _scaled_weight(key) in self._all_files}
        return {key: place for key, place in self._all_files.items() if key not in scales}

    @property
    def is_fp8(self) -> bool:
        return len(self.files) < len(self._all_files)

    @cached_property
    def _all_files(self) -> dict[str, tuple[str, str]]:
        index = self.folder / INDEX_FILE
        if index.exists():
            stored = json.loads(index.read_text())["weight_map"]
        elif (self.folder / WEIGHT_FILE).exists():
            stored = dict.fromkeys(self._file(WEIGHT_FILE).keys(), WEIGHT_FILE)
        else:
            raise FileNotFoundError(
                f"{self.folder}: neither {WEIGHT_FILE} nor {INDEX_FILE}; save it as safetensors first"
            )
        return {hub_name(key, self._renames): (file, key) for key, file in stored.items()}

    def _file(self, name: str) -> Any:
        if Path(name).name != name:
            raise ValueError(f"{self.folder / INDEX_FILE}: file name {name!r} leaves the folder")
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]

    def slices(self, key: str) -> Slices:
        file, stored_key = self.files[key]
        values = self._file(file).get_slice(stored_key)
        if scale := self._all_files.get(key + SCALE):
            return Dequantised(values, self._file(scale[0]).get_tensor(scale[1]))
        return values

    def stored(self, key: str) -> tuple[str, torch.dtype, list[int]]:
        """Name and shape that `key` has in the files and its dtype, which for FP8 weights is the config's."""
        file, stored_key = self.files[key]
        slices = self._file(file).get_slice(stored_key)
        dtype = _DTYPES[slices.get_dtype()]
        if key + SCALE in self._all_files:
            config = json.loads((self.folder / CONFIG_FILE).read_text())
            dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return stored_key, dtype, slices.get_shape()


def _scaled_weight(key: str) -> str | None:
    """The FP8 weight that `key` is a scale of, if it has the name of one."""
    for suffix, weight in {SCALE: "", ".activation_scale": ".weight"}.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix) + weight
    return None


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def resolve(path: str | Path) -> Path:
    """The folder of a checkpoint; a name that is no folder is fetched from the Hugging Face hub."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_absolute() or str(path).startswith("."):
        raise FileNotFoundError(f"checkpoint {path}: no such folder")
    return Path(
        snapshot_download(
            str(path),
            allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"],
            ignore_patterns="consolidated*",  # Mistral's repositories hold the weights twice
        )
    )


# --- import ----------------------------------------------------------------------------------------------


def import_hf(chunks: list[VLMModel], path: str | Path, family: Family, hf_config: Any) -> None:
    """Fill the weights of this rank's model chunks from the HF checkpoint, reading only their slices.

    Raises ValueError that names the keys when the checkpoint has one that no rule covers, lacks one that a
    parameter needs, or has one of another shape. Values are cast to the parameters' dtype.
    """
    checkpoint, rules = HFCheckpoint(path, family.renames), family.weights(hf_config)
    _check_no_unknown(checkpoint, rules, family)
    params = [pair for chunk in chunks for pair in named_global_weights(chunk)]
    for name, param in tqdm(
        params, "import", unit="tensor", disable=None if dist.get_rank() == 0 else True, leave=False
    ):
        rule, keys = find_rule(rules, name, checkpoint.files)
        rank, size = _place(name)
        if missing := [key for key in keys if key not in checkpoint.files]:
            raise ValueError(f"{checkpoint.folder}: lacks {missing}, needed for {name} {tuple(param.shape)}")
        sources = rule.sources(name, [checkpoint.slices(key) for key in keys])
        value = rule.operation.read(sources, rank, size)
        if value.shape != param.shape:
            shapes = {key: tuple(source.get_shape()) for key, source in zip(keys, sources, strict=True)}
            raise ValueError(
                f"{checkpoint.folder}: {shapes} gives {tuple(value.shape)} at tp {size} rank {rank}, but "
                f"{name} is {tuple(param.shape)}; do config.json and weights belong together?"
            )
        with torch.no_grad():
            param.copy_(value)


def _place(name: str) -> tuple[int, int]:
    """(rank, size) of the group that cuts this weight: experts are never cut."""
    if _EXPERT.search(name):
        return 0, 1
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _check_no_unknown(checkpoint: HFCheckpoint, rules: list[Rule], family: Family) -> None:
    def known(key: str) -> bool:
        return any(rule.covers(key) for rule in rules) or any(
            re.fullmatch(_pattern(pattern), key) for pattern in family.ignored_keys
        )

    if unknown := sorted(key for key in checkpoint.files if not known(key)):
        raise ValueError(
            f"{checkpoint.folder}: {len(unknown)} keys that {family.model_type} does not have, such as "
            f"{unknown[:5]}; importing would lose them"
        )


# --- export ----------------------------------------------------------------------------------------------


def hf_tensors(
    chunks: list[VLMModel],
    rules: list[Rule],
    files: Container[str] | None = None,
    value: Callable[[Tensor], Tensor | None] = lambda weight: weight.detach(),
) -> Iterator[tuple[str, Tensor]]:
    """(hub key, whole tensor) of this pipeline stage, one weight gathered at a time.

    A collective over the tensor-parallel group and the expert-parallel one: every rank of the stage iterates
    to the end. Of several layouts, the one in `files` is made, or else the rules' first. `value` picks what
    is exported of a weight (the tests export gradients), None for nothing.
    """
    fused: dict[str, dict[int, Tensor]] = {}
    for chunk in chunks:
        for name, weight in named_global_weights(chunk):
            rule, _ = find_rule(rules, name, files)
            local = value(weight) if rule.export else None
            if local is None:
                continue
            for global_name, shards in _gather(name, local.contiguous(), rule.operation, chunk.config):
                rule, keys = find_rule(rules, global_name, files)
                tensors = rule.operation.write(shards)
                if rule.rows is None:
                    yield from zip(keys, tensors, strict=True)
                    continue
                rows = fused.setdefault(keys[0], {})
                rows[rule.row(global_name)] = tensors[0]
                if len(rows) == rule.rows:
                    yield keys[0], torch.stack([rows[i] for i in range(rule.rows)])
                    del fused[keys[0]]


def _gather(
    name: str, local: Tensor, operation: Operation, config: TransformerConfig
) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, all ranks' shards) of this weight, and of the experts that the other ranks hold in its place."""
    if expert := _EXPERT.search(name):
        step = _experts_per_rank(config)
        experts = _all_gather(local, parallel_state.get_expert_model_parallel_group())
        for rank, shard in enumerate(experts):
            yield _EXPERT.sub(str(rank * step + int(expert[0]) % step), name), [shard]
    elif isinstance(operation, Whole):
        yield name, [local]
    else:
        yield name, _all_gather(local, parallel_state.get_tensor_model_parallel_group())


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local, group=group)
    return shards


def export_hf(
    chunks: list[VLMModel], output: str | Path, source: str | Path, family: Family, hf_config: Any
) -> None:
    """Write the model as an HF folder: weights named and typed as in `source`, its other files copied.

    Of an FP8 source the weights are written in the config's dtype, without scales and quantization_config.

    Collective over all ranks, which must share the file system. Each pipeline stage writes its own files
    while it gathers; `output` appears when everything is written. Raises FileExistsError when it exists.
    """
    output, checkpoint = Path(output), HFCheckpoint(source, family.renames)
    partial = output.with_name(output.name + ".partial")
    if dist.get_rank() == 0:
        if output.exists():
            raise FileExistsError(f"{output} exists; export to a new folder or remove it")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_side_files(checkpoint.folder, partial)
        adapt_config(partial / CONFIG_FILE, family, checkpoint.is_fp8)
    dist.barrier()
    # Expert-parallel groups reach over data-parallel ranks, so all take part; one rank of a stage writes.
    tensors = hf_tensors(chunks, family.weights(hf_config), checkpoint.files)
    written = _write_shards(tensors, checkpoint, partial, _is_first_of_stage())
    stages: list[dict[str, list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stages, written)
    if dist.get_rank() == 0:
        files = {file: keys for stage in stages for file, keys in stage.items()}
        _check_complete(files, checkpoint, family)
        _name_shards(partial, files)
        partial.rename(output)
    dist.barrier()


def _is_first_of_stage() -> bool:
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def copy_side_files(source: Path, output: Path) -> None:
    """Config, tokenizer, processor and chat template: everything small that is not a weight."""
    for file in source.iterdir():
        is_index = file.name.endswith(".safetensors.index.json")
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and not is_index:
            shutil.copyfile(file, output / file.name)


def adapt_config(file: Path, family: Family, dequantised: bool) -> None:
    """Rewrite config.json where it would be wrong for what is written; otherwise it stays byte for byte."""
    source = json.loads(file.read_text())
    config = family.portable_config(source)
    if dequantised:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    if config != source:
        file.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], checkpoint: HFCheckpoint, folder: Path, is_writer: bool
) -> dict[str, list[str]]:
    """File name -> keys of what this rank wrote; ranks that only take part in the gathering write nothing."""
    written: dict[str, list[str]] = {}
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            file = f"rank{dist.get_rank():05d}-{len(written):05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            written[file] = list(pending)
            pending.clear()

    for key, tensor in tensors:
        if is_writer:
            name, dtype, shape = checkpoint.stored(key)
            tensor = tensor.mT if turned(shape, tensor.shape) else tensor
            pending[name] = tensor.to("cpu", dtype).contiguous()
            if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
                flush()
    flush()
    return written


def _check_complete(files: dict[str, list[str]], checkpoint: HFCheckpoint, family: Family) -> None:
    exported = [key for keys in files.values() for key in keys]
    expected = {
        stored
        for key, (_, stored) in checkpoint.files.items()
        if not any(re.fullmatch(_pattern(pattern), key) for pattern in family.ignored_keys)
    }
    assert len(exported) == len(set(exported)), "an HF key was exported twice"
    assert set(exported) == expected, (
        f"exported and source keys differ: {sorted(set(exported) ^ expected)[:5]}"
    )


def _name_shards(folder: Path, files: dict[str, list[str]]) -> None:
    """Rename to HF's scheme and write the index; a single file needs none."""
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / WEIGHT_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, keys) in enumerate(sorted(files.items()), start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file).rename(folder / name)
        weight_map |= dict.fromkeys(keys, name)
    size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
