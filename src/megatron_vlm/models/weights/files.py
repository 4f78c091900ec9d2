"""Hugging Face checkpoints on disk: which keys they hold, and slices of their tensors."""

import json
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_vlm.files import read_text
from megatron_vlm.models.weights.rules import Slices
from megatron_vlm.models.weights.shards import DTYPE_NAMES, Stored
from megatron_vlm.supported import CONFIG_FILE, resolve
from megatron_vlm.weight_files import OnDisk, tensors_of

MAPPED_BYTES = 2**26  # files are unmapped after this much was read


def hub_name(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    """`key` as the hub's files spell it, from any of the spellings found in the wild or in memory."""
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


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

    def __init__(self, path: str | Path, renames: tuple[tuple[str, str], ...] = ()):
        self.folder = resolve(path)
        self._renames = renames
        self._open: dict[str, Any] = {}
        self._touched, self._lock = 0, threading.Lock()

    @cached_property
    def files(self) -> dict[str, OnDisk]:
        """All tensors, by hub key."""
        return tensors_of(self.folder, lambda key: hub_name(key, self._renames))

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
