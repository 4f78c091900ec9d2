"""Reads a checkpoint without running what its pickles name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_vlm.files import open_file
from megatron_vlm.messages import printable

_METADATA_NAMES = {  # by module, apart from torch's dtypes
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the plain records torch writes into `.metadata`, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def check_metadata(path: Path) -> None:
    """Raises ValueError if `.metadata`, which torch unpickles, holds anything but what torch writes there.

    Nothing that it names is run. The files that it refers to must lie beside it.
    """
    try:
        with open_file(path) as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        for stored in (metadata.storage_data or {}).values():
            if os.path.basename(stored.relative_path) != stored.relative_path:
                raise ValueError(f"it refers to {stored.relative_path}")
    except Exception as error:  # damaged pickles, and pickles of other things, raise anything
        raise ValueError(
            f"{printable(path)} is not the metadata of a checkpoint of ours ({printable(error)})"
        ) from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Sets the variable that overrules the `torch.load(weights_only=False)` of torch's checkpoint planner."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
