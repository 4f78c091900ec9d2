"""The tensors of a composed model: copied, grown or newly drawn, and written one after another."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.shards import SafetensorsFile, Stored, name_shards, split
from megatron_vlm.models.weights.ties import differ

TOWER, PROJECTOR, TEXT, HEAD = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.language_model.",
    "lm_head.",
)
TOWER_PREFIX = r"^(model\.)?(vision_tower\.|vision_model\.)(vision_model\.)?"
EMBEDDING_KEY, HEAD_KEY = "model.embed_tokens.weight", "lm_head.weight"
POOLING = "head."  # of a tower, which no composed model uses
SHARD_BYTES = 2**32
ROWS = 4096  # rows of the embedding that are read at a time


@dataclass(frozen=True)
class Copied:
    """A tensor of a source, with more rows if it is the embedding or the output layer."""

    source: HFCheckpoint
    key: str


@dataclass(frozen=True)
class RowStatistics:
    """Mean and standard deviation of each column of a matrix, over its present rows."""

    mean_D: Tensor
    deviation_D: Tensor

    @property
    def scale(self) -> float:
        """The root of the mean square of all values."""
        return (self.mean_D.square() + self.deviation_D.square()).mean().sqrt().item()


def is_tied(language: HFCheckpoint, asked: bool) -> bool:
    """Whether the output layer is the embedding: config.json asks for it, and the weights do not deny it."""
    if EMBEDDING_KEY not in language.files:
        raise ConfigError(
            f"--language-model {printable(language.folder)}: its weights lack {EMBEDDING_KEY}; give the "
            "checkpoint of a whole language model."
        )
    return asked and not (HEAD_KEY in language.files and differ(language, EMBEDDING_KEY, HEAD_KEY))


def sources_of(
    shapes: Mapping[str, tuple[int, ...]], tower: HFCheckpoint, language: HFCheckpoint, rows: int, tied: bool
) -> dict[str, Copied | None]:
    """Where each tensor of the composed model comes from; None: it is newly drawn. The embedding and the
    output layer have so many `rows` before they grow.

    Raises ConfigError for a tensor that a source lacks, that has another shape or cannot be copied, and for
    one that the composed model has no place for.
    """
    found: dict[str, Copied | None] = {}
    for name, shape in shapes.items():
        if name.startswith(PROJECTOR):
            found[name] = None
        elif name.startswith(TOWER):
            found[name] = _copied("--tower", tower, name.removeprefix(TOWER), shape)
        elif not (tied and name.startswith(HEAD)):
            key = name if name.startswith(HEAD) else "model." + name.removeprefix(TEXT)
            if key in (EMBEDDING_KEY, HEAD_KEY):
                shape = (rows, *shape[1:])
            found[name] = _copied("--language-model", language, key, shape)
    used = {copied.key for copied in found.values() if copied and copied.source is language}
    _refuse_unused("--language-model", language, used | ({HEAD_KEY} if tied else set()), language.files)
    of_tower = [key for key, tensor in tower.files.items() if re.match(TOWER_PREFIX, tensor.key)]
    used = {copied.key for copied in found.values() if copied and copied.source is tower}
    _refuse_unused("--tower", tower, used, of_tower or tower.files)
    return found


def _copied(option: str, source: HFCheckpoint, key: str, shape: tuple[int, ...]) -> Copied:
    stored = source.shape(key) if key in source.files else "missing"
    if stored != list(shape):
        raise ConfigError(
            f"{option} {printable(source.folder)}: {key} is {stored} in its weights and {list(shape)} by its "
            "config.json; put config.json and weights of the same model into that folder."
        )
    return Copied(source, key)


def _refuse_unused(option: str, source: HFCheckpoint, used: set[str], keys: Mapping | list[str]) -> None:
    unused = [key for key in keys if key not in used and not key.startswith(POOLING)]
    if unused:
        raise ConfigError(
            f"{option} {printable(source.folder)}: its weights hold {len(unused)} tensors that its "
            f"config.json does not ask for, such as {printable(unused[0])}; put config.json and weights of "
            "the same model into that folder."
        )


class Writer:
    """Writes the tensors of a composed model as safetensors files, one tensor in memory at a time."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Mapping[str, Copied | None],
        new_rows: str,
        seed: int,
    ):
        self._sources = sources
        self._new_rows = new_rows
        self._seed = seed
        embedding = sources[TEXT + "embed_tokens.weight"]
        self.dtype = embedding.source.stored(embedding.key).dtype
        self._embedding = embedding
        self.stored = {
            name: Stored(name, copied.source.stored(copied.key).dtype if copied else self.dtype, shapes[name])
            for name, copied in sources.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored.values())

    def write(self, folder: Path, names: Mapping[str, str], shard_bytes: int = SHARD_BYTES) -> None:
        """Write all files; `names` says how a tensor is called in them."""
        files: dict[str, list[str]] = {}
        with tqdm(
            desc="compose", total=self.nbytes, unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:
            for number, tensors in enumerate(split(self.stored.values(), shard_bytes)):
                renamed = [Stored(names[each.name], each.dtype, each.shape) for each in tensors]
                file = SafetensorsFile(folder / f"part-{number:05d}", renamed)
                for each in tensors:
                    file.write(names[each.name], self.value(each.name))
                    bar.update(each.nbytes)
                file.close()
                files[file.path.name] = file.names
        name_shards(folder, files)

    def value(self, name: str) -> Tensor:
        """The tensor as it is written."""
        copied = self._sources[name]
        stored = self.stored[name]
        if copied is None:
            return self._started(name).to(stored.dtype)
        value = copied.source.slices(copied.key)[...]
        copied.source.release(value.nbytes)
        missing = stored.shape[0] - value.shape[0] if value.dim() else 0
        if not missing:
            return value
        return torch.cat([value, self._grown(name, missing, rows_of(copied)).to(value.dtype)])

    def _grown(self, name: str, count: int, rows: RowStatistics) -> Tensor:
        """New rows: the mean of the present ones, or drawn with the mean and deviation of each column."""
        mean = rows.mean_D.expand(count, -1)
        return mean if self._new_rows == "mean" else mean + rows.deviation_D * self._normal(name, mean.shape)

    def _started(self, name: str) -> Tensor:
        """A tensor of the projector: norms and biases as always, linears that keep the scale of their input,
        but for the last one, which brings it to the scale of the language model's embedding."""
        shape = self.stored[name].shape
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        scale = rows_of(self._embedding).scale if name == PROJECTOR + "linear_2.weight" else 1.0
        return self._normal(name, shape) * (scale / math.sqrt(shape[1]))

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Standard normal values that depend on the seed and on the tensor's name alone."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7])))


def rows_of(copied: Copied) -> RowStatistics:
    """Measures the rows of a matrix; reads a few at a time."""
    matrix = copied.source.slices(copied.key)
    count, width = matrix.get_shape()
    total_D = torch.zeros(width, dtype=torch.float64)
    squares_D = torch.zeros(width, dtype=torch.float64)
    for start in range(0, count, ROWS):
        part = matrix[slice(start, start + ROWS),].double()
        total_D += part.sum(0)
        squares_D += part.square().sum(0)
        copied.source.release(part.nbytes)
    mean_D = total_D / count
    return RowStatistics(mean_D.float(), (squares_D / count - mean_D.square()).clamp(min=0).sqrt().float())
