"""Opens sources with the `datasets` library: folders, parquet, arrow, hub names. Media stay encoded."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from megatron_vlm import stores
from megatron_vlm.data.on_disk.descriptions import check_fields, damaged, read_mapping
from megatron_vlm.data.on_disk.plain import check_quotes, plain_file, table_of, tabular_kind
from megatron_vlm.data.records.source_errors import name_damaged_file, reader_of
from megatron_vlm.files import check_file
from megatron_vlm.overrides import load_yaml

MEDIA = (datasets.Image, datasets.Video, datasets.Audio)
KINDS = (".arrow", ".parquet", ".jsonl", ".csv", ".tsv")  # files of rows, whatever else is in a folder
READERS = ("json", "csv", "parquet", "arrow")  # of `datasets`, for files of rows
# What `datasets` makes of folders whose files are rows
FILES_ALONE = {"text": "texts", "imagefolder": "images", "videofolder": "videos", "audiofolder": "sounds"}
ROWS_AT_ONCE = 10_000  # rows read at a time for the digest
OWN_FILES = "put the data into the dataset's folder, or give its own path"


def split_names(path: str | Path, subset: str | None = None) -> list[str]:
    """The splits of `path`; empty for a single dataset saved by `save_to_disk`."""
    loaded = load(path, subset)
    return list(loaded) if isinstance(loaded, dict) else []


def open_rows(path: str | Path, split: str | None = None, subset: str | None = None) -> datasets.Dataset:
    """The rows of a folder in `datasets` format, a folder or file of parquet/arrow, or a hub name.

    Images stay encoded. Raises ValueError if `split` is needed and not given, or does not exist.
    """
    loaded = load(path, subset)
    if isinstance(loaded, dict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        loaded = loaded[_split_of(path, split, loaded)]
    return _keep_media_encoded(loaded)


def open_stream(path: str | Path) -> datasets.IterableDataset:
    """The training rows of `path` as a stream; nothing is written to disk first. Images stay encoded.

    Raises ValueError as `open_rows`.
    """
    builder = _builder(path)
    with name_damaged_file(path):
        loaded = builder.as_streaming_dataset()
    split = next(iter(loaded)) if len(loaded) == 1 else "train"
    stream = loaded[_split_of(path, split, loaded)]
    return stream.decode(False) if stream.features is not None else stream


def _split_of(path: str | Path, split: str | None, splits: Iterable[str]) -> str:
    """The split, if it is one of them; raises ValueError if not."""
    if split not in splits:
        asked = "has no split train" if split is None else f"has no split {split!r}"
        folder = Path(path, min(splits))
        one = f"the folder of one, {folder}" if folder.is_dir() else "a meta file that names one as `split`"
        raise ValueError(f"dataset {path}: {asked}, but {', '.join(sorted(splits))}; give {one}.")
    return split


def load(path: str | Path, subset: str | None = None) -> datasets.Dataset | datasets.DatasetDict:
    """Loads `path` with `datasets`. Raises ValueError that names the file that cannot be read."""
    if is_saved_folder(Path(path)):
        _check_files(Path(path))
        with name_damaged_file(path):
            return datasets.load_from_disk(str(path))
    builder = _builder(path, subset)
    with name_damaged_file(path):
        builder.download_and_prepare()
        return builder.as_dataset()


def _check_files(path: Path) -> None:
    """Raise ValueError for a pipe, which would be waited for, and a saved folder that leads elsewhere."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        is_read = file == path or reader_of(file) or file.name == datasets.config.REPOYAML_FILENAME
        if is_read and (file.exists() or file.name[0] != ".") and not file.is_dir():
            check_file(file)
    splits = ["."]
    if (described := path / "dataset_dict.json").exists():
        check_fields(described, content := read_mapping(described), {"splits": list[str]})
        splits = content.get("splits", [])
    for state in (path / split / "state.json" for split in splits if is_saved_folder(path)):
        _check_inside(path, str(state.parent.relative_to(path)), described)
        check_fields(state, content := read_mapping(state), {"_data_files": list[dict[str, str]]})
        if not content.get("_data_files"):
            raise damaged(state, "names no data file: it has no rows")
        for file in content["_data_files"]:
            _check_inside(path, str(state.parent.relative_to(path) / file.get("filename", "")), state)


def rows_digest(rows: datasets.Dataset, name: str) -> str:
    """A digest of all rows in their order: of all values, but only of the lengths of media and other bytes.

    Raises ValueError if rows cannot be read because their file is damaged.
    """
    total, table = hashlib.blake2b(), rows.with_format("arrow")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        columns = table[start : start + ROWS_AT_ONCE]
        try:
            for column in columns.column_names:
                for leaf in _leaves(columns[column].combine_chunks()):
                    leaf.validate(full=True)
                    total.update(pa.record_batch([leaf], ["values"]).serialize())
        except pa.ArrowException as error:
            raise damaged(name, f"has rows after {start} that cannot be read ({error})") from error
    return total.hexdigest()[:16]


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """The flat arrays that hold the values of a nested array."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _leaves(array.storage)
    elif isinstance(array, pa.ChunkedArray):
        for chunk in array.chunks:
            yield from _leaves(chunk)
    elif pa.types.is_struct(kind):
        yield array.is_valid()
        for field in array.flatten():
            yield from _leaves(field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield pc.list_value_length(array)
        yield from _leaves(array.flatten())
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        yield pc.binary_length(array)
    else:
        yield array


def is_saved_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _builder(path: str | Path, subset: str | None = None) -> datasets.DatasetBuilder:
    """The builder of what `datasets` would read. Raises ValueError unless all of it is the dataset's own:
    a folder's inside of it, a hub name's on the hub."""
    local, name, options = Path(path), str(path), {}
    if local.exists():
        _check_files(local)
    named = local.is_dir() and _check_card(local)
    if local.is_file():
        name, options = _reader_of(local)
    with name_damaged_file(path):
        builder = datasets.load_dataset_builder(name, name=subset, **options)
    files = [*chain.from_iterable((builder.config.data_files or {}).values())]
    if builder.name in FILES_ALONE:
        _check_records_are_read(local, FILES_ALONE[builder.name], files)
    for file in files:
        if local.is_dir():
            _check_inside(local, file, file)
        elif not local.exists() and not file.startswith(("hf://", datasets.config.HF_ENDPOINT)):
            raise damaged(path, f"names the data file {file}, which is not on the hub", OWN_FILES)
    if local.is_dir() and builder.name in READERS and not named and subset is None:
        _check_none_left(local, files)
    if local.is_dir() and builder.name == "csv" and builder.info.features is None:
        for file in filter(os.path.isfile, files):
            options |= _as_text(Path(file))
        with name_damaged_file(path):
            return datasets.load_dataset_builder(name, name=subset, **options)
    return builder


def _check_records_are_read(path: Path, kind: str, files: list[str]) -> None:
    """Raise ValueError for a folder of media that `datasets` would read without conversations."""
    names = {Path(file).name for file in files}
    rows = [file for file in sorted(path.glob("*")) if reader_of(file) and file.name not in names]
    rows = [file for file in rows if not file.name.startswith(("dataset_info", "metadata."))]
    if rows:
        raise damaged(path, f"is read as {kind}, without {rows[0].name}", f"give {rows[0]}")
    if not any(name.startswith("metadata.") for name in names):
        remedy = (
            "write a line of JSON for each conversation, with image, question and answer, and give that file"
        )
        raise damaged(path, f"is read as {kind} alone", remedy)


def _check_none_left(folder: Path, files: list[str]) -> None:
    """Raises ValueError for rows beside the files that `datasets` would read: it takes one kind of file."""
    read = {Path(file).resolve() for file in files}
    for place in sorted({Path(file).parent for file in files}):
        for file in sorted(place.iterdir()):
            if file.suffix in KINDS and file.name[0] != "." and file.resolve() not in read:
                fact = f"would be left out: `datasets` reads {len(read)} other files of {folder}"
                raise damaged(file, fact, "give all files as a list, or move it")


def _reader_of(path: Path) -> tuple[str, dict[str, Any]]:
    """The name that `datasets` has for files of this kind, and how it is to read this one."""
    plain = plain_file(path)
    options: dict[str, Any] = {"data_files": str(plain)}
    if kind := tabular_kind(plain):
        return kind, options
    return "csv", options | _as_text(path)


def _as_text(path: Path) -> dict[str, Any]:
    """How `datasets` is to read a table: all its values are text. Raises ValueError for a first row of more
    values than the header, by which pandas would move all rows: it takes their first values for an index."""
    table = table_of(plain_file(path))
    if table is None:
        return {}
    separator, (names, first, *_) = table
    if len(first) > len(names):
        fact = f"has {len(names)} columns and, in its first row, {len(first)} values"
        raise damaged(path, fact, f"write values that hold {separator!r} in quotes")
    check_quotes(path, separator)
    features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    return {"sep": separator, "features": features, "keep_default_na": False}


def _check_card(folder: Path) -> bool:
    """Whether a card names data. Raises ValueError if it is not in its folder: `datasets` would fetch it."""
    named = False
    for file in (folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME):
        if not (file.is_file() and file.stat().st_size):
            continue
        settings = read_mapping(file, _settings_of_card if file.suffix == ".md" else load_yaml, "mend it")
        for pattern in _names_of_data(settings.get("configs")):
            if urlsplit(pattern).scheme or "::" in pattern:
                raise damaged(file, f"names the data {pattern}", OWN_FILES)
            _check_inside(folder, pattern, file)
            named = True
    return named


def _settings_of_card(text: str) -> dict:
    block = REGEX_YAML_BLOCK.search(text)
    return load_yaml(block[2]) if block and block[2].strip() else {}


def _check_inside(folder: Path, name: str, named_by: Any) -> None:
    """Raises ValueError if a path, or what it is a link to, is not in the folder. The hub's cache is links to
    what lies beside its snapshots."""
    home = folder.resolve()
    home = home.parent.parent if home.parent.name == "snapshots" else home
    if ".." in Path(name).parts or not (folder / name).resolve().is_relative_to(home):
        raise damaged(named_by, f"leads to {name}, outside of {folder}", OWN_FILES)


def _names_of_data(value: Any, named: bool = False) -> Iterator[str]:
    """The texts under `data_files` and `data_dir` of a card, however deep."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _names_of_data(item, named or key in ("data_files", "data_dir"))
    elif isinstance(value, list):
        for item in value:
            yield from _names_of_data(item, named)
    elif isinstance(value, str) and named:
        yield value


def _keep_media_encoded(rows: datasets.Dataset) -> datasets.Dataset:
    for column, feature in rows.features.items():
        if (encoded := _encoded(feature)) != feature:
            rows = rows.cast_column(column, encoded)
    return rows


def _encoded(feature: Any) -> Any:
    """The feature with decoding turned off for every medium in it, however deep."""
    if isinstance(feature, MEDIA):
        return type(feature)(decode=False)
    if isinstance(feature, dict):
        return {name: _encoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return dataclasses.replace(feature, feature=_encoded(feature.feature))
    return feature


def media_root(path: str | Path) -> Path | str:
    """The folder that media paths may not leave: the dataset's, or for a hub name the cache of `datasets`."""
    local = Path(path)
    if stores.is_store(path):
        return stores.parent(path)
    if not local.exists():
        return Path(datasets.config.HF_CACHE_HOME)
    return local if local.is_dir() else local.parent
