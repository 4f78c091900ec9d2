"""Hugging Face checkpoints on disk: which keys they hold, slices of their tensors, and files to write.

Safetensors files are written in place: every tensor has its offset before the first one is written. Whether
a checkpoint's output layer is its embedding is decided by the weights, as in Transformers.
"""

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.files import atomic_write, open_to_write, read_text
from megatron_vlm.models.weights.rules import Slices, Vocabulary, WeightMap
from megatron_vlm.parallel.setup import on_first_rank
from megatron_vlm.supported import CONFIG_FILE, INDEX_FILE, WEIGHT_FILE, missing_weights, resolve
from megatron_vlm.weight_files import OnDisk, Renames, tensors_of

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
STAGING_BYTES = 2**24  # so much of a tensor is cast, transposed or copied from the device at a time


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split(tensors: Iterable[Stored], shard_bytes: int) -> Iterator[list[Stored]]:
    """The tensors of each file: a file takes the next tensors until it holds `shard_bytes`."""
    shard: list[Stored] = []
    for tensor in tensors:
        shard.append(tensor)
        if sum(t.nbytes for t in shard) >= shard_bytes:
            yield shard
            shard = []
    if shard:
        yield shard


class SafetensorsFile:
    """A file of the given tensors, whose values may come in any order and in parts.

    It is on disk after `close`, which raises AssertionError if bytes of any tensor are missing. Format:
    https://huggingface.co/docs/safetensors/index#format
    """

    def __init__(self, path: Path, tensors: list[Stored]):
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # so that each starts aligned
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for tensor in ordered:
            start, end = end, end + tensor.nbytes
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (start, end),
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.path, self._missing = path, end
        self._place = {t.name: (t, 8 + len(text) + header[t.name]["data_offsets"][0]) for t in ordered}
        self._file = open_to_write(path, "xb", buffering=0)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    @property
    def names(self) -> list[str]:
        return list(self._place)

    def write(self, name: str, value: Tensor, row: int | None = None) -> None:
        """Write a whole tensor, or one `row` or block along its first axis, cast to the stored dtype."""
        stored, offset = self._place[name]
        shape = list(value.shape)
        of_row = shape[value.dim() - len(stored.shape) + 1 :]
        fits = shape == list(stored.shape) if row is None else of_row == list(stored.shape[1:])
        assert fits, f"{name}: {shape} for {stored.shape}"
        offset += (row or 0) * value.numel() * stored.dtype.itemsize
        for part in _staged(value.detach(), stored.dtype):
            self._put(memoryview(part.view(torch.uint8).numpy()), offset)
            offset += part.nbytes
            self._missing -= part.nbytes

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        assert not self._missing, f"{self.path}: {self._missing} bytes were not written"

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count


def _staged(value: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensor as flat parts in row-major order on the CPU, converted a few rows at a time."""
    rows = value if value.dim() else value[None]
    step = max(1, STAGING_BYTES * len(rows) // max(1, rows.numel() * dtype.itemsize))
    for part in rows.split(step):
        yield part.to("cpu", dtype).contiguous().flatten()


def name_shards(folder: Path, files: dict[str, list[str]]) -> None:
    """Rename `files` (name -> its tensors) to HF's scheme and write the index; a single file needs none."""
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
    atomic_write(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


MAPPED_BYTES = 2**26  # files are unmapped after this much was read


class Dequantised:
    """An FP8 tensor on disk times its scale, in fp32, read slice by slice.

    `scale` is one number, or one per block: `blocks` is from `OnDisk`. Bytes are exponents.
    """

    def __init__(self, values: Slices, scale: Tensor, blocks: Sequence[Sequence[int]] = ()):
        self._values, self._blocks = values, [torch.tensor(axis) for axis in blocks]
        scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
        self._scale = scale if blocks else scale.reshape(())

    def get_shape(self) -> list[int]:
        return self._values.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else () if index is Ellipsis else (index,)
        scale, axis = self._scale, 0
        for block_of, part in zip_longest(self._blocks, parts[: len(self._blocks)], fillvalue=slice(None)):
            chosen = block_of[part]  # has no axis if `part` is a number
            scale = scale[(slice(None),) * axis + (chosen,)]
            axis += chosen.dim()
        return self._values[index].float().mul_(scale)


class HFCheckpoint:
    """The safetensors of an HF folder (or hub name), by hub key whatever prefixes the files use.

    FP8 weights with scales are read as the values that they stand for, other tensors are views of mapped
    files. Scales have no keys here. Raises ConfigError as `tensors_of` when `files` is first asked for.
    """

    def __init__(self, path: str | Path, renames: Renames = ()):
        self.folder = resolve(path)
        self._renames = renames
        self._open: dict[str, Any] = {}
        self._touched, self._lock = 0, threading.Lock()

    @cached_property
    def files(self) -> dict[str, OnDisk]:
        """All tensors, by hub key."""
        return tensors_of(self.folder, self._renames)

    @property
    def is_fp8(self) -> bool:
        return any(tensor.scale for tensor in self.files.values())

    def _file(self, name: str) -> Any:
        file = self._open.get(name)  # another thread may release it at any time
        if file is None:
            file = self._open[name] = safe_open(self.folder / name, framework="pt")
        return file

    def release(self, nbytes: int) -> None:
        """Say that `nbytes` were read and are no longer needed.

        The pages that were read of mapped files count as this process's memory until the files are unmapped.
        That happens here now and then; a file is opened again when it is needed.
        """
        with self._lock:
            self._touched += nbytes
            if self._touched >= MAPPED_BYTES:
                self._open.clear()
                self._touched = 0

    def shape(self, key: str) -> list[int]:
        return self.files[key].shape

    def slices(self, key: str) -> Slices:
        tensor = self.files[key]
        values = self._file(tensor.file).get_slice(tensor.key)
        if scale := tensor.scale:
            return Dequantised(values, self._file(scale.file).get_tensor(scale.key), tensor.blocks)
        return values

    def stored(self, key: str) -> Stored:
        """The tensor as the files hold it; FP8 weights in the config's dtype."""
        tensor = self.files[key]
        dtype = _DTYPES[tensor.dtype]
        if tensor.scale:
            config = json.loads(read_text(self.folder / CONFIG_FILE))
            dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return Stored(tensor.key, dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as `stored` gives them: what an export takes."""
        return sum(self.stored(key).nbytes for key in self.files)


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


ROWS = 4096  # rows of the two matrices that are compared at a time


def are_tied(weight_map: WeightMap, folder: Path) -> bool:
    """Whether the output layer is the embedding, as `PreTrainedModel.tie_weights` has it.

    It is if config.json asks for it (`weight_map.tied`), or leaves it to a default that does, unless both
    matrices are stored and differ. Without weights in the folder config.json decides alone. If processes have
    joined, one rank reads.
    """
    if weight_map.tied and not missing_weights(folder):
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
        embedding_rows, head_rows = (source[slice(start, start + ROWS),] for source in (embedding, head))
        if not torch.equal(embedding_rows, head_rows.to(embedding_rows.dtype)):
            return True
        nbytes = embedding_rows.nbytes + head_rows.nbytes
        del embedding_rows, head_rows
        checkpoint.release(nbytes)
    return False
