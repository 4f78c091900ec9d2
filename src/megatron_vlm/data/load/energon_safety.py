"""Energon descriptions from strangers are data: they call no function and lead to no file elsewhere."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml, ryml
from megatron.energon.flavors import CrudeWebdataset
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.metadataset import dataset_loader

from megatron_vlm import stores
from megatron_vlm.config import DataConfig
from megatron_vlm.data.on_disk.descriptions import RESTORE, damaged, read_mapping, reading_data
from megatron_vlm.data.on_disk.paths import DataSource
from megatron_vlm.data.records.blends import path_names
from megatron_vlm.data.shard_format import SOURCE
from megatron_vlm.data.shard_types import OWN_CODE, SampleRule
from megatron_vlm.files import add_path_to_errors, check_file, read_file

META = ".nv-meta"
ALLOWED_CLASSES = ("Metadataset", "MetadatasetV2")
MAX_DATASETS = 1000  # that a metadataset may hold, itself and those in its datasets counted
INFO_NAMES = (".info.json", ".info.yaml")  # patterns leave dot files out
CONFIG_KEYS = ("dataset_config", "split_config")
CONFIG_NAME = re.compile(r"[\w.-]+\.(yaml|json)")  # a file in META
PLAIN_KEYS = {"split_parts", "exclude", "shard_counts", "energon_version"}  # of a split and an index
NO_CODE = f"refused, Energon could run code; only {', '.join(ALLOWED_CLASSES)} of megatron.energon are data"


def check_dataset(path: str | EPath) -> None:
    """Raise ValueError unless everything that Energon would load for `path` is plain data.

    A metadataset, and the description of a split, can name any function to call. Here they may only name
    metadatasets. `read_as_data` keeps Energon from the file that describes samples, dataset.yaml.
    """
    waiting = [_path(path)]
    for _ in range(MAX_DATASETS):
        if not waiting:
            return
        dataset = waiting.pop()
        if _is_metadataset(dataset):
            description = _read_description(dataset)
            _check_plain(description, dataset)
            waiting += [dataset.parent / reference for reference in _references(description)]
        else:
            _check_folder(dataset)
    raise damaged(path, f"names more than {MAX_DATASETS} datasets, or itself", "take references out")


@contextmanager
def read_as_data(data: DataConfig) -> Iterator[None]:
    """Inside, Energon opens every dataset as crude shards, with the `SampleRule` of its dataset.yaml.

    Energon itself would make the class that the file names and import the code beside it.
    """
    before = dataset_loader.get_dataset_from_config
    dataset_loader.get_dataset_from_config = partial(_crude_shards, data)
    try:
        yield
    finally:
        dataset_loader.get_dataset_from_config = before


def _crude_shards(
    data: DataConfig,
    path: EPath | str,
    *,
    split_part: str | None = None,
    subflavors: dict[str, Any] | None = None,
    dataset_config: str | None = None,
    split_config: str | None = None,
    **settings: Any,
) -> CrudeWebdataset:
    """In the place of Energon's function of the same arguments."""
    # the rule is read here, so that Energon does not open the file
    meta = EPath(path) / META
    file = meta / (dataset_config or "dataset.yaml")
    description = {} if data.cooker and not file.is_file() else _read_description(file)
    try:
        rule = SampleRule.of(description, data)
    except ValueError as error:
        raise damaged(file, str(error), OWN_CODE) from error
    _check_split(meta / (split_config or "split.yaml"))
    return CrudeWebdataset(
        EPath(path),
        subflavors={**(description.get("subflavors") or {}), **(subflavors or {}), **rule.stored()},
        split_config=split_config or "split.yaml",
        split_part=split_part or "train",
        **settings,
    )


def reading_sources(sources: list[DataSource]) -> AbstractContextManager[None]:
    """Name the datasets in what Energon raises while it opens them, and say what to do."""
    return reading_data(", ".join(source.path for source in sources))


def split_names(path: str | EPath) -> list[str]:
    """Return the splits of a dataset or metadataset that have shards; `energon` writes empty ones, too."""
    path = _path(path)
    if _is_metadataset(path):
        splits = _read_description(path).get("splits") or {}
        return sorted(name for name, split in splits.items() if _has_shards(path.parent, split, name))
    file = path / META / "split.yaml"
    parts = _read_description(file).get("split_parts") or {} if file.is_file() else {}
    return sorted(name for name, shards in parts.items() if shards)


def _has_shards(folder: EPath, split: Any, name: str) -> bool:
    """Return whether any dataset that a split of a metadataset refers to has shards in its part of it."""
    return any(
        mapping.get("split_part", name) in split_names(folder / mapping["path"])
        for mapping in _mappings(split)
        if isinstance(mapping.get("path"), str)
    )


def blends_by_weight(path: str | EPath) -> bool:
    """Return whether `path` is, or holds, a metadataset that draws by weights and so has no epochs."""
    path = _path(path)
    if not _is_metadataset(path):
        return False
    description = _read_description(path)
    by_weight = description.get("__class__") != "MetadatasetV2" or any(
        isinstance(split, dict) and "blend" in split for split in description["splits"].values()
    )
    return by_weight or any(blends_by_weight(path.parent / inner) for inner in _references(description))


def _path(path: str | EPath) -> EPath:
    return EPath(stores.for_energon(path))


def _is_metadataset(path: EPath) -> bool:
    """Return whether a dataset is a YAML file, and no prepared folder of such a name."""
    return path.name.endswith(".yaml") and not _info_files(path)


def _info_files(path: EPath) -> list[EPath]:
    files = [path / META / name for name in INFO_NAMES]
    return [file for file in files if (file.local_path().exists() if file.is_local() else file.is_file())]


def _check_folder(path: EPath) -> None:
    meta = path / META
    if not (infos := _info_files(path)):
        fact = f"is not a prepared Energon dataset, it has no {META}/.info.json"
        raise damaged(path, fact, "run `megatron-vlm prepare` first")
    for file in (*infos, meta / "split.yaml"):
        _check_split(file)


def _check_split(file: EPath) -> None:
    description = _read_description(file)
    _check_plain(description, file)
    if extra := sorted(set(description) - PLAIN_KEYS - {"__module__", "__class__"}):
        raise damaged(file, f"sets {extra}", NO_CODE)


def _read_description(file: EPath) -> dict:
    """Read a file's mapping by Energon's own YAML parser: so the check sees what Energon will see. The parser
    makes plain data only."""
    return read_mapping(file, json.loads if file.name.endswith(".json") else _parse_yaml)


def _parse_yaml(text: str) -> Any:
    try:
        return load_yaml(text.encode())
    except (ryml.ExceptionBasic, AttributeError) as error:  # the latter: a root without content
        raise ValueError("no YAML") from error


def _check_plain(description: dict, file: EPath) -> None:
    for mapping in _mappings(description):
        module = mapping.get("__module__") or "megatron.energon"
        if "__function__" in mapping:
            raise damaged(file, f"names the function {module}.{mapping['__function__']}", NO_CODE)
        if {"__module__", "__class__"} & mapping.keys():
            name = mapping.get("__class__")
            if module != "megatron.energon" or name not in ALLOWED_CLASSES:
                raise damaged(file, f"names the class {module}.{name}", NO_CODE)
        for key in CONFIG_KEYS:
            if mapping.get(key) is not None and not CONFIG_NAME.fullmatch(str(mapping[key])):
                raise damaged(file, f"names {key} {mapping[key]!r}", f"give a .yaml file of {META}")


def _references(description: dict) -> Iterator[str]:
    """Yield every `path` in a metadataset, with its auxiliary datasets."""
    for mapping in _mappings(description):
        if isinstance(mapping.get("path"), str):
            yield mapping["path"]
        aux = mapping.get("aux") or {}
        yield from (path for path in aux.values() if isinstance(path, str) and "filesystem" not in path)


def _mappings(value: Any) -> Iterator[dict]:
    """Yield every mapping in a description, at any depth."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _mappings(item)


def checked_source(sources: list[DataSource], split: str) -> str | dict:
    """Return what Energon opens: the only path, or a metadataset of all paths that names each in its keys."""
    for source in sources:
        with reading_sources([source]):
            check_dataset(source.path)
            if split not in (names := split_names(source.path)):
                raise damaged(
                    source.path, f"has no {split!r} split, only {names}", f"prepare it as {split}=PATH"
                )
            if len(sources) > 1 and blends_by_weight(source.path):
                fact = "draws by weights, so it has no epoch that a list could hold once"
                remedy = "make it a blend_epochized, or name its datasets in the list"
                raise damaged(source.path, fact, remedy)
    if len(sources) == 1:
        return str(_path(sources[0].path))
    blend = [
        {"path": str(_path(source.path)), "repetitions": int(source.share or 1), "subflavors": {SOURCE: name}}
        for source, name in zip(sources, path_names(sources), strict=True)
    ]
    description = {"path": EPath("/"), "splits": {split: {"blend_epochized": blend}}}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **description}


# -- shards


def walk(dataset) -> Iterator[Any]:
    """Yield the datasets of Energon that a dataset is made of, itself first."""
    yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from walk(inner)


def guard_readers(dataset) -> None:
    """Check a dataset's shards, and make its readers name a shard that cannot be read.

    Raises ValueError for a shard outside the dataset, FileNotFoundError for a missing one, and ValueError for
    a local one that is shorter than its index says: hours of training may pass before Energon reads it.
    """
    for inner in walk(dataset):
        for reader in getattr(inner, "join_readers", ()):
            if isinstance(reader, ITarReader):
                for shard in reader.shard_infos:
                    _check_shard(reader.base_path, shard.name, shard.count)
                read = _naming_store(reader, reader._get_item_by_sample_pointer)
                reader._get_item_by_sample_pointer = partial(_read_sample, reader, read)
                reader._get_itar_sample_pointer = _naming_store(reader, reader._get_itar_sample_pointer)


def _check_shard(folder: EPath, name: str, samples: int) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise damaged(folder / META / "split.yaml", f"names {name}, which leads out of the dataset")
    if not folder.is_local():
        return
    shard = folder.local_path() / name
    index = shard.with_name(shard.name + ".idx")  # where each sample begins, and where the last one ends
    for file in (shard, index):
        with add_path_to_errors(file, RESTORE):
            check_file(file)
    raw = read_file(index)
    if len(raw) != 8 * (samples + 1):
        raise damaged(index, f"has {len(raw)} bytes, and is no index of the {samples} samples in .info.json")
    if (size := shard.stat().st_size) < (end := int(np.frombuffer(raw, "<u8")[-1])):
        raise damaged(shard, f"holds {size} bytes, {index.name} ends at {end}; it is truncated")


def _naming_store(reader: ITarReader, read: Callable) -> Callable:
    """Return the function that reads a shard, so that it names the store if that does not answer."""
    return read if reader.base_path.is_local() else stores.at(reader.base_path.url)(read)


def _read_sample(reader: ITarReader, read: Callable, pointer: Any, *args: Any) -> Any:
    try:
        with reading_data(reader.tar_filepaths[pointer.tar_file_id]):
            return read(pointer, *args)
    finally:
        for tar in reader.itar_files_cache.values():
            tar.members.clear()  # while a tar is open, tarfile keeps each member it passed: 1 KB a sample
