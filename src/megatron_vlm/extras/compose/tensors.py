"""The tensors of a composed model: copied, grown or newly drawn, and written one after another."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_vlm.config import ConfigError
from megatron_vlm.models.weights.files import HFCheckpoint, hub_name
from megatron_vlm.models.weights.shards import SafetensorsFile, Stored, name_shards, split
from megatron_vlm.models.weights.ties import differ

TOWER = "model.vision_tower."
PROJECTOR = "model.multi_modal_projector."
TEXT = "model.language_model."
HEAD = "lm_head."
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


def is_tied(language: HFCheckpoint, asked: bool) -> bool:
    """Whether the output layer is the embedding: config.json asks for it, and the weights do not deny it."""
    if EMBEDDING_KEY not in language.files:
        raise ConfigError(
            f"--language-model {language.folder}: its weights lack {EMBEDDING_KEY}; give the "
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
    sources: dict[str, Copied | None] = {}
    for name, shape in shapes.items():
        if name.startswith(PROJECTOR):
            sources[name] = None
        elif name.startswith(TOWER):
            sources[name] = _copied("--tower", tower, name.removeprefix(TOWER), shape)
        elif not (tied and name.startswith(HEAD)):
            key = name if name.startswith(HEAD) else "model." + name.removeprefix(TEXT)
            if key in (EMBEDDING_KEY, HEAD_KEY):
                shape = (rows, *shape[1:])
            sources[name] = _copied("--language-model", language, key, shape)
    of_tower = [key for key, tensor in tower.files.items() if re.match(TOWER_PREFIX, tensor.key)]
    of_text = language.files.keys() - ({HEAD_KEY} if tied else set())
    for option, source, keys in (
        ("--language-model", language, of_text),
        ("--tower", tower, of_tower or tower.files),
    ):
        used = {copied.key for copied in sources.values() if copied and copied.source is source}
        if unused := sorted(key for key in keys if key not in used and not key.startswith(POOLING)):
            raise ConfigError(
                f"{option} {source.folder}: its weights hold {len(unused)} tensors that its "
                f"config.json does not ask for, such as {unused[0]}; put config.json and weights "
                "of the same model into that folder."
            )
    return sources


def _copied(option: str, source: HFCheckpoint, key: str, shape: tuple[int, ...]) -> Copied:
    stored = source.shape(key) if key in source.files else "missing"
    if stored != list(shape):
        raise ConfigError(
            f"{option} {source.folder}: {key} is {stored} in its weights and {list(shape)} by its "
            "config.json; put config.json and weights of the same model into that folder."
        )
    return Copied(source, key)


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
        self._embedding = sources[TEXT + "embed_tokens.weight"]
        self.stored = {}
        for name, copied in sources.items():
            like = copied or self._embedding  # what is newly drawn has the embedding's dtype
            self.stored[name] = Stored(name, like.source.stored(like.key).dtype, shapes[name])

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored.values())

    def write(
        self, folder: Path, renames: tuple[tuple[str, str], ...] = (), shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Write all files; `renames` are patterns in names of tensors → as files spell them."""
        files: dict[str, list[str]] = {}
        with tqdm(
            desc="compose", total=self.nbytes, unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:
            for number, tensors in enumerate(split(self.stored.values(), shard_bytes)):
                renamed = [replace(each, name=hub_name(each.name, renames)) for each in tensors]
                file = SafetensorsFile(folder / f"part-{number:05d}", renamed)
                for each, in_file in zip(tensors, renamed, strict=True):
                    file.write(in_file.name, self.value(each.name))
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
        if tuple(value.shape) == tuple(stored.shape):
            return value
        mean_D, deviation_D = rows_of(copied)
        new = mean_D.expand(stored.shape[0] - len(value), -1)
        if self._new_rows == "normal":
            new = new + deviation_D * self._normal(name, new.shape)
        return torch.cat([value, new.to(value.dtype)])

    def _started(self, name: str) -> Tensor:
        """A tensor of the projector: norms and biases as always, linears that keep the scale of their input,
        but for the last one, which brings it to the scale of the language model's embedding."""
        shape = self.stored[name].shape
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        scale = 1.0
        if name == PROJECTOR + "linear_2.weight":
            mean_D, deviation_D = rows_of(self._embedding)
            scale = (mean_D.square() + deviation_D.square()).mean().sqrt().item()
        return self._normal(name, shape) * (scale / math.sqrt(shape[1]))

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Standard normal values that depend on the seed and on the tensor's name alone."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7])))


def rows_of(copied: Copied) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (D,) of each column of a matrix; reads a few rows at a time."""
    matrix = copied.source.slices(copied.key)
    count, width = matrix.get_shape()
    total_D = torch.zeros(width, dtype=torch.float64)
    squares_D = torch.zeros(width, dtype=torch.float64)
    for start in range(0, count, ROWS):
        rows = matrix[slice(start, start + ROWS),].double()
        total_D += rows.sum(0)
        squares_D += rows.square().sum(0)
        copied.source.release(rows.nbytes)
    mean_D = total_D / count
    deviation_D = (squares_D / count - mean_D.square()).clamp(min=0).sqrt()
    return mean_D.float(), deviation_D.float()
