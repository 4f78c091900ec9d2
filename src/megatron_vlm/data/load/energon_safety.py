"""The description files of an Energon dataset, read as data before Energon may act on them."""

import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import braceexpand
import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml, ryml
from megatron.energon.flavors.webdataset.itar_reader import ITarReader

from megatron_vlm import stores
from megatron_vlm.data.on_disk.descriptions import RESTORE, check_fields, damaged, read_mapping
from megatron_vlm.data.on_disk.paths import DataSource
from megatron_vlm.data.records.blends import path_names
from megatron_vlm.data.shard_format import SOURCE
from megatron_vlm.files import check_file, naming, read_file
from megatron_vlm.messages import printable

META = ".nv-meta"
ALLOWED_CLASSES = ("CrudeWebdataset", "Metadataset", "MetadatasetV2")
MOST_DATASETS = 1000  # that a metadataset may hold, by whatever way
RANGE, NESTED = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}"), re.compile(r"\{[^}]*\{")
INFO_NAMES = (".info.json", ".info.yaml")  # patterns leave dot files out
CONFIG_KEYS = ("dataset_config", "split_config")
CONFIG_NAME = re.compile(r"[\w.-]+\.(yaml|json)")  # the files in META that are checked
PLAIN_KEYS = {
    *("__module__", "__class__", "subflavors"),
    *("split_parts", "exclude"),
    *("shard_counts", "energon_version"),
}
SHARES = {"weight", "repetitions"}  # of the datasets of a blend
FIELDS = {
    "subflavors": dict,
    "split_parts": dict[str, list[str]],
    "exclude": list[str],
    "shard_counts": dict[str, int],
}


def check_dataset(path: str | EPath) -> None:
    """Raises ValueError unless everything that Energon would load for `path` is plain data.

    A description file (`dataset.yaml`, `split.yaml`, metadatasets and what they refer to) can name any
    function to call. Here it may only name CrudeWebdataset and metadatasets of it. Local shards must exist
    and be as long as their index says. No description may stand for more than its dataset has.
    """
    waiting = [_path(path)]
    read = 0
    while waiting:
        dataset = waiting.pop()
        read += 1
        if read > MOST_DATASETS:  # Energon would walk them all, or never end
            fact = f"names more than {MOST_DATASETS} datasets, or itself"
            raise damaged(path, fact, "take references out")
        if _is_metadataset(dataset):
            description = _read_description(dataset)
            _check_plain(description, dataset)
            if not isinstance(description.get("splits"), dict):
                remedy = "give it `splits: {train: {...}}` as Energon's metadatasets have"
                raise damaged(dataset, "has no splits", remedy)
            waiting += [dataset.parent / reference for reference in _references(description)]
        else:
            _check_folder(dataset)


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
    """Whether `path` is, or holds, a metadataset that draws by weights and so has no epochs."""
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


def _check_folder(path: EPath) -> None:
    meta = path / META
    infos = [meta / name for name in INFO_NAMES if _is_there(meta / name)]
    if not infos:
        raise ValueError(
            f"data: {path} is not a prepared Energon dataset, it has no {META}/.info.json; run "
            "`megatron-vlm prepare` first."
        )
    if (meta / "sample_loader.py").is_file():
        raise ValueError(f"data: {meta / 'sample_loader.py'} is code that Energon would run; refused.")
    # whatever a setting may name is checked, also where no setting names it; a missing file is an error
    needed = meta / "dataset.yaml", meta / "split.yaml"
    descriptions = {}
    for file in {*infos, *needed, *_entries(meta, ".yaml"), *_entries(meta, ".json")}:
        description = descriptions[file.name] = _read_description(file)
        _check_plain(description, file)
        check_fields(file, description, FIELDS)
        if extra := sorted(set(description) - PLAIN_KEYS):
            raise ValueError(
                f"data: {file} sets {extra}; refused, some settings of Energon name code to run."
            )
    counts = descriptions[infos[0].name].get("shard_counts", {})
    if not descriptions["split.yaml"].get("split_parts"):
        raise damaged(meta / "split.yaml", "has no split_parts")
    for name, description in sorted(descriptions.items()):
        _check_shards(path, meta / name, description, counts)


def _check_shards(path: EPath, file: EPath, description: dict, counts: dict[str, int]) -> None:
    """Checks the shards that a description of splits names, and that it excludes no more than there is."""
    shards = set()
    for patterns in (description.get("split_parts") or {}).values():
        for shard in _expanded(file, patterns, len(counts)):
            if Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise damaged(file, f"names {printable(shard)}, which leads out of the dataset")
            if shard not in counts:
                raise damaged(file, f"names {printable(shard)}, which .info.json does not count")
            shards.add(shard)
    for shard in sorted(shards) if path.is_local() else ():
        _check_shard(path.local_path() / shard, counts[shard])
    samples = sum(counts[shard] for shard in shards)
    for _ in _expanded(file, description.get("exclude") or [], len(counts) + samples):
        pass  # each is a shard or a sample


def _entries(folder: EPath, suffix: str) -> Iterator[EPath]:
    """Everything in `folder` whose name ends in `suffix`, also what is not a file."""
    if not folder.is_local():
        yield from folder.glob(f"*{suffix}")
    else:
        yield from (folder / entry.name for entry in folder.local_path().glob(f"*{suffix}"))


def _is_metadataset(path: EPath) -> bool:
    """Whether a dataset is a YAML file, and no prepared folder of such a name."""
    return path.name.endswith(".yaml") and not any(_is_there(path / META / name) for name in INFO_NAMES)


def _is_there(file: EPath) -> bool:
    return file.local_path().exists() if file.is_local() else file.is_file()


def _read_description(file: EPath) -> dict:
    """The file's mapping, by Energon's own YAML parser: so the check sees what Energon will see. The parser
    makes plain data only."""
    return read_mapping(file, json.loads if file.name.endswith(".json") else _parse_yaml)


def _parse_yaml(text: str) -> Any:
    try:
        return load_yaml(text.encode())
    except (ryml.ExceptionBasic, AttributeError) as error:  # the latter: a root without content
        raise ValueError("no YAML") from error


def _check_plain(description: dict, file: EPath) -> None:
    for mapping in _mappings(description):
        module, cls = mapping.get("__module__"), mapping.get("__class__")
        if "__function__" in mapping:
            raise ValueError(
                f"data: {file} names the function {module}.{mapping['__function__']}; refused, a dataset "
                "description must not call functions."
            )
        if (module or "megatron.energon") != "megatron.energon" or (cls and cls not in ALLOWED_CLASSES):
            raise ValueError(
                f"data: {file} names the class {module}.{cls}; refused, only {', '.join(ALLOWED_CLASSES)} of "
                "megatron.energon are plain data."
            )
        for key in CONFIG_KEYS:
            if mapping.get(key) is not None and not CONFIG_NAME.fullmatch(str(mapping[key])):
                raise ValueError(
                    f"data: {file} names {key} {mapping[key]!r}; refused, give a .yaml file of {META}."
                )
        for share in SHARES & mapping.keys() if {"path", "join"} & mapping.keys() else ():
            value = mapping[share]
            if type(value) not in (int, float) or not 0 < value < math.inf:
                fact = f"{share} of {mapping.get('path')} is {value!r}"
                raise damaged(file, fact, "give a number above 0, or leave out what is not to be trained")


def _references(description: dict) -> Iterator[str]:
    """Every `path` in a metadataset, with its auxiliary datasets."""
    for mapping in _mappings(description):
        if isinstance(mapping.get("path"), str):
            yield mapping["path"]
        aux = mapping.get("aux") or {}
        yield from (path for path in aux.values() if isinstance(path, str) and "filesystem" not in path)


def _mappings(value: Any) -> Iterator[dict]:
    """Every mapping in a description, at any depth."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _mappings(item)


def _expanded(file: EPath, patterns: list[str], most: int) -> Iterator[str]:
    """The names that patterns with braces stand for. Raises ValueError if there are more than `most`."""
    names = 0
    for pattern in patterns:
        try:
            ranges = [
                (int(start), int(stop), int(step or 1) or 1) for start, stop, step in RANGE.findall(pattern)
            ]
            size = math.prod(abs(stop - start) // step + 1 for start, stop, step in ranges)
            if NESTED.search(pattern) or size > most:  # braceexpand would make them all before the first
                raise ValueError(f"braces in braces, or more than the {most} names that there are")
            for name in braceexpand.braceexpand(pattern):
                yield name
                if (names := names + 1) > most:
                    raise ValueError(f"more than the {most} names that there are")
        except ValueError as error:
            raise damaged(file, f"names {printable(pattern)}: {error}") from error


def _check_shard(shard: Path, samples: int) -> None:
    """Checks a shard by its index, which holds where each sample begins, and where the last one ends."""
    index = shard.with_name(shard.name + ".idx")
    for file in (shard, index):
        with naming(file, RESTORE):
            check_file(file)
    raw = read_file(index)
    offsets = np.frombuffer(raw[: len(raw) // 8 * 8], "<u8")
    if len(raw) % 8 or len(offsets) < 2 or (offsets[1:] <= offsets[:-1]).any():
        raise damaged(index, f"of {len(raw)} bytes is no index of samples")
    if len(offsets) - 1 != samples:
        raise damaged(index, f"has {len(offsets) - 1} samples, .info.json counts {samples}")
    if (size := shard.stat().st_size) < offsets[-1]:
        raise damaged(shard, f"holds {size} bytes, its index ends at {offsets[-1]}; it is truncated")


def checked_source(sources: list[DataSource], split: str) -> str | dict:
    """The source for Energon: the only path, or a metadataset of all paths that names each in its keys."""
    paths = [one.path for one in sources]
    for path in paths:
        check_dataset(path)
        if split not in (names := split_names(path)):
            raise ValueError(
                f"data: {path} has no {split!r} split, only {names}; prepare it as {split}=PATH."
            )
    if len(paths) == 1:
        return str(_path(paths[0]))
    for path in paths:
        if blends_by_weight(path):
            raise ValueError(
                f"data: {path} draws by weights, so it has no epoch that a list could hold once; make it a "
                "blend_epochized, or name its datasets in the list."
            )
    blend = [
        {"path": str(_path(one.path)), "repetitions": int(one.share or 1), "subflavors": {SOURCE: name}}
        for one, name in zip(sources, path_names(sources), strict=True)
    ]
    description = {"path": EPath("/"), "splits": {split: {"blend_epochized": blend}}}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **description}


def walk(dataset) -> Iterator[Any]:
    """The datasets of Energon that a dataset is made of, itself first."""
    yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from walk(inner)


def guard_readers(dataset) -> None:
    """Makes shard readers name a shard that cannot be read, and forget the members they have read."""
    for inner in walk(dataset):
        for reader in getattr(inner, "join_readers", ()):
            if isinstance(reader, ITarReader):
                read = _naming_store(reader, reader._get_item_by_sample_pointer)
                reader._get_item_by_sample_pointer = partial(_read_sample, reader, read)
                reader._get_itar_sample_pointer = _naming_store(reader, reader._get_itar_sample_pointer)


def _naming_store(reader: ITarReader, read: Callable) -> Callable:
    """The function that reads a shard, and names the store if it does not answer."""
    return read if reader.base_path.is_local() else stores.at(reader.base_path.url)(read)


def _read_sample(reader: ITarReader, read: Callable, pointer: Any, *args: Any) -> Any:
    try:
        return read(pointer, *args)
    except stores.StoreError:
        raise
    except (tarfile.TarError, ValueError, OSError) as error:
        shard = reader.tar_filepaths[pointer.tar_file_id]
        raise damaged(
            shard, f"cannot be read: {error}; it is damaged or was changed after it was indexed"
        ) from error
    finally:
        for tar in reader.itar_files_cache.values():
            tar.members.clear()  # while a tar is open, tarfile keeps each member it passed: 1 KB a sample
