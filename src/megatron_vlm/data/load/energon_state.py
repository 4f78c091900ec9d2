"""Energon's state objects in and out of JSON, with what it gets wrong; the fingerprint of an Energon dataset.

No pickle: a state file from a stranger can at worst be refused.
"""

import base64
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon import WorkerConfig
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SavableDatasetWrapper,
)
from megatron.energon.state import FlexState

from megatron_vlm.data.accounts.fingerprint import UNKNOWN, digest
from megatron_vlm.files import read_file

FORMAT = 1
_CLASSES = {
    cls.__name__: cls
    for cls in (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
        SystemRngState,
        SliceState,
    )
}


def to_json_data(value: Any) -> Any:
    """`value` as JSON data that `from_json_data` turns back into an equal object.

    Everything that is not a list, number, string or None becomes {"$": type, "v": content}.
    Raises TypeError for a type that no loader state holds.
    """
    # what JSON has stays as it is
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json_data(item) for item in value]
    # the rest is tagged with its type
    if isinstance(value, tuple):
        return {"$": "tuple", "v": [to_json_data(item) for item in value]}
    if isinstance(value, dict):
        pairs = [[to_json_data(key), to_json_data(item)] for key, item in value.items()]
        return {"$": "flex" if isinstance(value, FlexState) else "dict", "v": pairs}
    if type(value).__name__ in _CLASSES and dataclasses.is_dataclass(value):
        fields = {field.name: to_json_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$": type(value).__name__, "v": fields}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, bytes):
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        array = np.asarray(value)
        content = base64.b64encode(array.tobytes()).decode()
        return {"$": kind, "dtype": str(array.dtype), "shape": array.shape, "v": content}
    raise TypeError(
        f"loader state: cannot save a {type(value).__qualname__}; add it to data/load/energon_state.py."
    )


def from_json_data(data: Any) -> Any:
    """The object that `to_json_data` was given. Raises ValueError for a type it does not know."""
    if isinstance(data, list):
        return [from_json_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind, content = data["$"], data["v"]
    if kind == "tuple":
        return tuple(from_json_data(item) for item in content)
    if kind in ("flex", "dict"):
        pairs = ((from_json_data(key), from_json_data(item)) for key, item in content)
        return FlexState(pairs) if kind == "flex" else dict(pairs)
    if kind in _CLASSES:
        return _CLASSES[kind](**{name: from_json_data(item) for name, item in content.items()})
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("tensor", "array"):
        array = np.frombuffer(base64.b64decode(content), dtype=data["dtype"]).reshape(data["shape"]).copy()
        return torch.from_numpy(array) if kind == "tensor" else array
    raise ValueError(f"loader state: unknown type {kind!r}; the state is damaged or from a newer version.")


def energon_fingerprint(config: dict, workers: WorkerConfig) -> dict:
    """JSON data that identifies the dataset; it stays the same if the dataset's folder moves."""
    shards = sorted(_shards(config))
    config = _without_paths(config)
    counts, indices = [shard[:2] for shard in shards], [shard[2] for shard in shards]
    return {
        "dataset": f"{len(shards)} shards, {sum(n for _, n in counts)} samples, {digest(counts)}",
        "shards": UNKNOWN if UNKNOWN in indices else digest(indices),
        "rank": workers.rank,
        "world_size": workers.world_size,
        "num_workers": workers.num_workers,
        "pipeline": digest(config),
    }


def _without_paths(config: Any) -> Any:
    """The config without keys that begin with `_`: Energon marks so what may change between runs."""
    if isinstance(config, dict):
        return {key: _without_paths(item) for key, item in config.items() if not key.startswith("_")}
    return [_without_paths(item) for item in config] if isinstance(config, list | tuple) else config


def _shards(config: Any) -> Iterator[tuple[str, int, str]]:
    """(name, number of samples, digest of its index) of every shard; the digest of one in an object store is
    UNKNOWN. The index says where each sample begins."""
    if isinstance(config, dict):
        for shard in config.get("shards", ()):
            index = Path(str(shard["_path"]) + ".idx")
            is_local = index.is_file()
            content = hashlib.sha256(read_file(index)).hexdigest()[:16] if is_local else UNKNOWN
            yield shard["name"], shard["count"], content
    if isinstance(config, dict | list):
        for item in config.values() if isinstance(config, dict) else config:
            yield from _shards(item)


def checkpoint_of_worker(worker: SavableDatasetWrapper, last_sample_indexes: list[int]) -> Any:
    """A worker's checkpoint; before its first sample, the point it was restored to. Energon 7.4.1 counts one
    sample too many then (a slow worker, a state saved within a few batches of the start)."""
    if worker._last_checkpoints[-1].sample_index >= 0:
        return SavableDatasetWrapper.get_checkpoint(worker, last_sample_indexes)
    number = worker._worker_id
    skipped = worker._workers_skip_samples[number]
    return SavableDatasetCheckpoint(state=worker._workers_restore_from[number], offset=skipped)


def as_restored(restore_key: Any) -> Any:
    """The key with the part that `postencode_sample` adds doubled: Energon 7.4.1 reads that part twice."""
    if not isinstance(restore_key, list | tuple):
        return restore_key
    parts = [as_restored(part) for part in restore_key]
    is_document = [isinstance(part, list) and part[:1] == ["PackingDataset"] for part in parts]
    if parts[:1] == ["PackingDataset"]:
        parts = [
            part[:2] + part if doubled else part for part, doubled in zip(parts, is_document, strict=True)
        ]
    return parts
