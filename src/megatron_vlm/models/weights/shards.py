"""Writes safetensors files in place: every tensor has its offset before the first one is written."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_vlm.files import open_to_write, write_whole
from megatron_vlm.supported import INDEX_FILE, WEIGHT_FILE

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
    held: list[Stored] = []
    for tensor in tensors:
        held.append(tensor)
        if sum(t.nbytes for t in held) >= shard_bytes:
            yield held
            held = []
    if held:
        yield held


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
        given = list(value.shape)
        of_row = given[value.dim() - len(stored.shape) + 1 :]
        fits = given == list(stored.shape) if row is None else of_row == list(stored.shape[1:])
        assert fits, f"{name}: {given} for {stored.shape}"
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
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written


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
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
