"""What describes an Energon dataset on disk, read as data before Energon may act on it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import braceexpand
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml

META = ".nv-meta"
ALLOWED_CLASSES = {"CrudeWebdataset", "Metadataset", "MetadatasetV2"}
INFO_NAMES = (".info.json", ".info.yaml")  # patterns leave dot files out
CONFIG_KEYS = ("dataset_config", "split_config")
CONFIG_NAME = re.compile(r"[\w.-]+\.(yaml|json)")  # the files in META that are checked
DATASET_KEYS = {"__module__", "__class__", "subflavors"}
SPLIT_KEYS = {"split_parts", "exclude"}
INFO_KEYS = {"shard_counts", "energon_version"}


def check_dataset(path: str | EPath) -> None:
    """Raises ValueError unless everything that Energon would load for `path` is plain data.

    A description file (`dataset.yaml`, `split.yaml`, metadatasets and what they refer to) can name any
    function to call. Here it may name CrudeWebdataset and metadatasets of such, and nothing else. Local
    shards are checked to be there and as long as their index says.
    """
    _check_path(EPath(path), set())


def split_names(path: str | EPath) -> list[str]:
    """The splits of a dataset or metadataset; empty for a JSONL file, which is whole whatever the split."""
    path = EPath(path)
    if path.name.endswith(".jsonl"):
        return []
    if path.name.endswith(".yaml"):
        return sorted(_read_description(path).get("splits") or {})
    return sorted(_splits_of_folder(path))


def _check_path(path: EPath, seen: set[str]) -> None:
    if str(path) in seen:
        return
    seen.add(str(path))
    if path.name.endswith(".jsonl"):
        return
    if path.name.endswith(".yaml"):
        description = _read_description(path)
        _check_plain(description, path)
        for reference in _references(description):
            _check_path(path.parent / reference, seen)
        return
    _check_folder(path)


def _check_folder(path: EPath) -> None:
    meta = path / META
    infos = [meta / name for name in INFO_NAMES if (meta / name).is_file()]
    if not infos:
        raise ValueError(f"data: {path} is not a prepared Energon dataset; run `megatron-vlm prepare` first.")
    if (meta / "sample_loader.py").is_file():
        raise ValueError(f"data: {meta / 'sample_loader.py'} is code that Energon would run; refused.")
    for file in {*infos, *meta.glob("*.yaml"), *meta.glob("*.json")}:
        description = _read_description(file)
        _check_plain(description, file)
        if not any(set(description) <= keys for keys in (DATASET_KEYS, SPLIT_KEYS, INFO_KEYS)):
            extra = sorted(set(description) - DATASET_KEYS - SPLIT_KEYS - INFO_KEYS)
            raise ValueError(
                f"data: {file} sets {extra}; refused, some settings of Energon name code to run."
            )
    if path.is_local():
        for shard in sorted({name for names in _splits_of_folder(path).values() for name in names}):
            _check_shard(path.local_path() / shard)


def _read_description(file: EPath) -> dict:
    """With Energon's own YAML parser, which only makes plain data: what is checked is what it will see."""
    with file.open("rb") as stream:
        description = json.load(stream) if file.name.endswith(".json") else load_yaml(stream)
    if not isinstance(description, dict):
        raise ValueError(f"data: {file} holds a {type(description).__name__}; expected a mapping.")
    return description


def _check_plain(value: Any, file: EPath) -> None:
    if isinstance(value, dict):
        if "__function__" in value:
            raise ValueError(
                f"data: {file} names the function {value.get('__module__')}.{value['__function__']}; "
                "refused, a dataset description must not call functions."
            )
        module, cls = value.get("__module__"), value.get("__class__")
        plain = (module or "megatron.energon") == "megatron.energon" and (cls or "") in {*ALLOWED_CLASSES, ""}
        if not plain:
            raise ValueError(
                f"data: {file} names the class {module}.{cls}; refused, only {sorted(ALLOWED_CLASSES)} of "
                "megatron.energon are plain data."
            )
        for key in CONFIG_KEYS:
            if value.get(key) is not None and not CONFIG_NAME.fullmatch(str(value[key])):
                raise ValueError(
                    f"data: {file} names {key} {value[key]!r}; refused, give a .yaml file of {META}."
                )
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, file)


def _references(value: Any) -> Iterator[str]:
    """Every `path` of a metadataset, and the auxiliary datasets."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if isinstance(value.get("path"), str):
            yield value["path"]
        aux = value.get("aux") or {}
        yield from (item for item in aux.values() if isinstance(item, str) and "filesystem" not in item)
        for item in value.values():
            yield from _references(item)


def _splits_of_folder(path: EPath) -> dict[str, list[str]]:
    file = path / META / "split.yaml"
    parts = (_read_description(file).get("split_parts") or {}) if file.is_file() else {}
    return {
        split: [name for pattern in patterns for name in braceexpand.braceexpand(pattern)]
        for split, patterns in parts.items()
    }


def _check_shard(shard: Path) -> None:
    index = shard.with_name(shard.name + ".idx")
    for file in (shard, index):
        if not file.is_file():
            raise FileNotFoundError(f"data: {file} is missing; restore it or prepare the dataset again.")
    (end,) = struct.unpack("<Q", index.read_bytes()[-8:])
    if shard.stat().st_size < end:
        raise ValueError(
            f"data: {shard} holds {shard.stat().st_size} bytes, its index ends at {end}; the file is "
            "truncated, restore it or prepare the dataset again."
        )
