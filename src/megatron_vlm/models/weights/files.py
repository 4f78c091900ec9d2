"""Hugging Face checkpoints on disk: which keys they hold, and slices of their tensors."""

from __future__ import annotations

import json
import re
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vlm.messages import printable
from megatron_vlm.models.weights.rules import Slices
from megatron_vlm.models.weights.shards import DTYPE_NAMES, Stored
from megatron_vlm.supported import CONFIG_FILE, resolve
from megatron_vlm.weight_files import weight_files

SCALE = "_scale_inv"  # an FP8 tensor's key + this is the key of its scale
MAPPED_BYTES = 2**26  # files are unmapped after this much was read


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
            if (blocks := scale.shape[axis]) > 1:
                block_of = torch.arange(length) // (length // blocks)
                scale = scale.index_select(axis, block_of[parts[axis]] if axis < len(parts) else block_of)
        return self._values[index].float().mul_(scale)


class HFCheckpoint:
    """The safetensors of an HF folder (or hub name), by hub key whatever prefixes the files use.

    FP8 weights with scales (`weight_scale_inv`, one per tensor or per block) are read as the values that they
    stand for; scales, also those of activations, have no keys here. Other tensors are views of mapped files.
    """

    def __init__(self, path: str | Path, renames: tuple[tuple[str, str], ...] = ()):
        self.folder = resolve(path)
        self._renames = renames
        self._open: dict[str, Any] = {}
        self._touched, self._lock = 0, threading.Lock()

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
        found: dict[str, tuple[str, str]] = {}
        for file in weight_files(self.folder):
            for key in self._file(file).keys():
                name = hub_name(key, self._renames)
                if name in found:
                    raise ValueError(
                        f"{self.folder}: {printable(key)} of {file} and {printable(found[name][1])} of "
                        f"{found[name][0]} are the same tensor of the model; remove one of them."
                    )
                found[name] = (file, key)
        return found

    def _file(self, name: str) -> Any:
        file = self._open.get(name)  # another thread may release it at any time
        if file is None:
            try:
                file = self._open[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{printable(self.folder / name)} is damaged ({printable(error)}); download it again."
                ) from error
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

    def problem(self, key: str) -> str | None:
        """Why the tensor of that key cannot be trained as it is stored; None if it can."""
        file, stored_key = self.files[key]
        dtype = self._file(file).get_slice(stored_key).get_dtype()
        if dtype not in _DTYPES:
            return f"is stored as {dtype}"
        scale = self._all_files.get(key + SCALE)
        if (dtype == _FP8) != bool(scale):
            return f"is stored as {dtype} {'with' if scale else 'without'} a scale ({key + SCALE!r})"
        return None

    def shape(self, key: str) -> list[int]:
        return self.slices(key).get_shape()

    def slices(self, key: str) -> Slices:
        file, stored_key = self.files[key]
        values = self._file(file).get_slice(stored_key)
        if scale := self._all_files.get(key + SCALE):
            return Dequantised(values, self._file(scale[0]).get_tensor(scale[1]))
        return values

    def stored(self, key: str) -> Stored:
        """The tensor as the files hold it; FP8 weights in the config's dtype."""
        file, stored_key = self.files[key]
        slices = self._file(file).get_slice(stored_key)
        dtype = _DTYPES[slices.get_dtype()]
        if key + SCALE in self._all_files:
            config = json.loads((self.folder / CONFIG_FILE).read_text())
            dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return Stored(stored_key, dtype, tuple(slices.get_shape()))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as `stored` gives them: what an export takes."""
        return sum(self.stored(key).nbytes for key in self.files)


def _scaled_weight(key: str) -> str | None:
    """The FP8 weight whose scale `key` is; None if it is not named like a scale."""
    for suffix, weight in {SCALE: "", ".activation_scale": ".weight"}.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix) + weight
    return None


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FP8 = DTYPE_NAMES[torch.float8_e4m3fn]
