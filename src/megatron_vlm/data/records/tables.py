"""Map-style datasets on disk: records are read one at a time by index, from any process.

All of them give what `data.chatml.record` reads: a record with the package's column names, and the folder
under which its media lie.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm import stores
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.columns import Columns
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.paths import ROWS, DataSource
from megatron_vlm.data.on_disk.rows_file import (
    REPAIR,
    is_conversation,
    lines_file,
    on_disk,
    record_places,
    tabular_kind,
    unpacked,
)
from megatron_vlm.data.records.blends import MapDataset, blend_datasets, path_names
from megatron_vlm.data.records.meta import entries_of, read_meta
from megatron_vlm.files import check_file, open_file

CHECKED_RECORDS = 1000  # the first ones: one must be there, and every mapped column must occur


@dataclass
class HFDataset(MapDataset):
    """A table over a `datasets.Dataset` with undecoded images."""

    name: str
    rows: Any
    root: Path | str
    columns: Columns

    def __post_init__(self) -> None:
        self.columns.check(self.rows.column_names, self.name)
        self.identity = f"{self.rows._fingerprint} {self.columns}"
        self.rows = self.rows.with_format("arrow")  # so that media are not decoded

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> tuple[dict, Path | str]:
        [row] = self.rows[index].to_pylist()
        return self.columns.of_arrow(row), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return self.name, index

    def content(self) -> str:
        from megatron_vlm.data.records.hub import rows_digest

        return rows_digest(self.rows, self.name)


class JsonDataset(MapDataset):
    """Records in JSON or JSON Lines. Keeps where each lies in the file, but not the records.

    Raises ValueError for JSON that is not valid, and if none of the first lines is a record. A single invalid
    line is a bad record.
    """

    def __init__(self, path: str | Path, root: Path | str, columns: Columns) -> None:
        self.name = str(path)
        self.root = root
        self.path = path = on_disk(path)
        self._file = open_file(lines_file(path))
        self._version = _version(os.fstat(self._file.fileno()))
        self._numbers, self._starts, self._stops = (
            np.array(array("q", chain.from_iterable(record_places(self._file)))).reshape(-1, 3).T
        )
        self.columns = columns
        media = root if isinstance(root, str) else root.resolve()
        self.identity = f"{path.resolve()} {_version(path.stat())} {media} {self.columns}"
        first = [self._columns_of(index) for index in range(min(len(self), CHECKED_RECORDS))]
        if not any(first):
            fact = f"holds no record: not one of its first {CHECKED_RECORDS} is a JSON object"
            raise damaged(path, fact, REPAIR)
        columns.check(sorted(set(chain.from_iterable(first))), str(path))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, index: int) -> tuple[dict, Path | str]:
        return self.columns(self._raw(index)), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return self.name, int(self._numbers[index])

    def _columns_of(self, index: int) -> set[str]:
        """Return the keys of a record as it is stored; none if it is no record."""
        try:
            record = self._raw(index)
        except BadSample:
            return set()
        if is_conversation(record):
            return {"messages"}
        return set(map(str, record)) if isinstance(record, dict) else set()

    def _raw(self, index: int) -> Any:
        start, stop = int(self._starts[index]), int(self._stops[index])
        text = os.pread(self._file.fileno(), stop - start, start)
        if _version(os.fstat(self._file.fileno())) != self._version:
            raise damaged(self.path, "was changed while it was read", "start again, and leave it as it is")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # bad JSON, other text than UTF-8, nested beyond reason
            raise BadSample("bad_json", str(error)) from error

    def content(self) -> str:
        with open_file(self.path) as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _version(stat: os.stat_result) -> str:
    """Changes when somebody writes into an open file, not when another takes its name."""
    return f"{stat.st_size} {stat.st_mtime_ns}"


# -- opening


def open_table(
    path: str | Path,
    split: str | None = None,
    *,
    columns: Columns | None = None,
    media_dir: str | Path | None = None,
    datasets: Sequence[str] = (),
    kind: str | None = None,
    subset: str | None = None,
) -> MapDataset:
    """The rows of `path`: a file of rows, a meta file, or what `datasets` opens (folder, hub name).

    columns     the names of its fields and turns
    media_dir   the folder that paths of media are relative to and may not leave; default: the source's own
    datasets    the datasets of a meta file to read; default: all
    kind        json, meta or hf; default: what it holds tells

    Raises ValueError that names the file if a source cannot be read, FileNotFoundError if it does not exist.
    """
    kind = kind or kind_of(path)
    if datasets and kind != "meta":
        raise ValueError(f"data.datasets: {path} is no meta file of several datasets; drop the setting.")
    if media_dir is not None and not (stores.is_store(media_dir) or Path(media_dir).is_dir()):
        raise FileNotFoundError(f"data.media_dir: {media_dir} is not a folder.")
    root, columns = None if media_dir is None else stores.folder(media_dir), columns or Columns()
    # A meta file names several sources, each with its own columns and media
    if kind == "meta":
        if stores.is_store(path):
            raise ValueError(f"data: {path} is a meta file; give its datasets as a list, or a copy on disk.")
        entries = entries_of(Path(path), columns, root, datasets)
        tables = {name: _open_entry(path, source, options) for name, (source, options) in entries.items()}
        return blend_datasets(tables, [source for source, _ in entries.values()])
    # Lines are read here, one at a time; `datasets` opens everything else
    if kind == "json":
        return JsonDataset(path, root or stores.parent(path), columns)
    from megatron_vlm.data.records.hub import media_root, open_rows

    return HFDataset(str(path), open_rows(on_disk(path), split, subset), root or media_root(path), columns)


def open_sources(pairs: Sequence[tuple[DataSource, str | None]], **options: Any) -> MapDataset:
    """One table of all sources and their splits, each opened as by `open_table`."""
    tables = [open_table(source.path, split, subset=source.subset, **options) for source, split in pairs]
    sources = [source for source, _ in pairs]
    if len(tables) == 1 and sources[0].whole:
        return tables[0]
    return blend_datasets(dict(zip(path_names(sources), tables, strict=True)), sources)


def kind_of(path: str | Path) -> str:
    """How `path` is read, by what it holds: as json, as meta, or by `datasets` as hf. Raises ValueError."""
    path = on_disk(path)
    if path.suffix in ROWS and not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; give the path of a file or folder.")
    if path.exists() and not path.is_dir():
        check_file(path)
    if not path.is_file():
        return "hf"
    plain = unpacked(path)
    if tabular_kind(plain):
        return "hf"
    return "json" if read_meta(plain) is None else "meta"


def source_splits(path: str | Path, subset: str | None = None) -> list[str]:
    """The splits of a source; empty for a source without splits."""
    if kind_of(path) != "hf":
        return []
    from megatron_vlm.data.records.hub import split_names

    return split_names(on_disk(path), subset)


def _open_entry(meta: str | Path, source: DataSource, options: dict[str, Any]) -> MapDataset:
    """Return a dataset of a meta file: the split that it names, or else `train` if there is one."""
    if kind_of(source.path) == "meta":
        raise ValueError(f"{meta}: {source.path} is a meta file itself; name its datasets here.")
    if options["split"] is None and "train" in source_splits(source.path):
        options["split"] = "train"
    return open_table(source.path, subset=source.subset, **options)
