"""Map-style sources: rows on disk, read one at a time by number, from any process.

What opens as what is said in TABLES. All give the same: a record in the package's words and the folder its
media lie under, which is what `data.records` reads.
"""

from __future__ import annotations

import functools
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from megatron_vlm.config import suggestion
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.layouts import Layout

CHECKED_RECORDS = 1000  # of a JSON file, in which every mapped column must occur
META_SOURCES = ("file_name", "hf_hub_url")
META_KEYS = {
    *META_SOURCES,
    *("columns", "tags", "formatting", "media_dir", "sample_ratio", "num_samples", "split", "subset"),
    "ranking",
}
FORMATTINGS = ("alpaca", "sharegpt", "openai")  # the record itself tells
FILES = (".json", ".jsonl", ".parquet", ".arrow")
LARGEST_META = 1 << 24  # bytes


class Table(Protocol):
    """Rows by number, from 0."""

    identity: str  # changes with the data, as far as can be told without reading it

    def __len__(self) -> int: ...

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        """The rows of an epoch, in no particular order; as many in each."""

    def record(self, index: int) -> tuple[dict, Path]:
        """A record in the package's words and its media root. Raises BadSample."""

    def origin(self, index: int) -> tuple[str, int]:
        """File or dataset, and which record of it (a JSONL line counts from 0, blank ones included)."""

    def key(self, index: int) -> str: ...


class _Whole:
    """What tables share of which every row is in every epoch."""

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return np.arange(len(self))

    def key(self, index: int) -> str:
        return f"{self.origin(index)[1]:09d}"


@dataclass
class HFTable(_Whole):
    """A `datasets.Dataset` with undecoded images."""

    name: str
    rows: Any
    root: Path
    layout: Layout

    def __post_init__(self) -> None:
        self.layout.check_columns(self.rows.column_names, self.name)
        self.identity = f"{self.rows._fingerprint} {self.layout}"

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> tuple[dict, Path]:
        from megatron_vlm.data.records import without_nulls

        return self.layout(without_nulls(self.rows[index])), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return self.name, index


class JsonTable(_Whole):
    """JSON Lines, or a JSON array: where each record lies in the file is found once, records are not kept.

    Raises ValueError for an array that is not valid JSON; a line that is not is a bad record.
    """

    def __init__(self, path: Path, root: Path, layout: Layout, lines: bool) -> None:
        self.path, self.root, self.layout = path, root, layout
        found = np.array(array("q", _lines(path) if lines else _elements(path))).reshape(-1, 3)
        self._numbers, self._starts, self._stops = found.T
        self._file = open(path, "rb")
        stat = path.stat()
        self.identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {root.resolve()} {layout}"
        if layout.columns and len(self):
            layout.check_columns(self._columns(), str(path))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, index: int) -> tuple[dict, Path]:
        return self.layout(self._raw(index)), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return str(self.path), int(self._numbers[index])

    def _raw(self, index: int) -> Any:
        start, stop = int(self._starts[index]), int(self._stops[index])
        try:
            return json.loads(os.pread(self._file.fileno(), stop - start, start))
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, nested beyond reason
            raise BadSample("bad_json", str(error)) from error

    def _columns(self) -> list[str]:
        seen: set[str] = set()
        for index in range(min(len(self), CHECKED_RECORDS)):
            try:
                record = self._raw(index)
            except BadSample:
                continue
            seen.update(record if isinstance(record, dict) else ())
        return sorted(seen)


def _lines(path: Path) -> Iterator[int]:
    """Number, start and stop of each line that is not blank, one after another."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                yield from (number, start, start + len(line))
            start += len(line)


def _elements(path: Path) -> Iterator[int]:
    """Number, start and stop in bytes of each element of a JSON array."""
    try:
        text = path.read_bytes().decode()
        bom = text.startswith("\ufeff")
        elements = list(_element_spans(text, int(bom)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); repair it or convert it to JSONL.") from error
    at, read = 0, 0
    for number, (start, stop) in enumerate(elements):
        at += len(text[read:start].encode())
        size = len(text[start:stop].encode())
        yield from (number, at, at + size)
        at, read = at + size, stop


def _element_spans(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Spans of an array's elements; each is parsed, and forgotten."""
    decoder, space = json.JSONDecoder(), json.decoder.WHITESPACE
    at = space.match(text, at).end()
    if text[at : at + 1] != "[":
        raise ValueError("it holds no array of records")
    at = space.match(text, at + 1).end()
    if text[at : at + 1] != "]":
        while True:
            stop = decoder.raw_decode(text, at)[1]
            yield at, stop
            at = space.match(text, stop).end()
            if text[at : at + 1] != ",":
                break
            at = space.match(text, at + 1).end()
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("Extra data", text, at + 1)


@dataclass
class Blend:
    """Several tables, each with how many of its rows an epoch has.

    A table's epochs follow one another through endless passes over its rows, each in a random order: whatever
    the share, every row comes round as often as any other, give or take one.
    """

    tables: Mapping[str, Table]
    counts: Mapping[str, int]  # rows in an epoch

    _starts: ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._names = list(self.tables)
        self._starts = np.cumsum([0, *(len(table) for table in self.tables.values())])
        parts = [f"{name} {self.counts[name]} {table.identity}" for name, table in self.tables.items()]
        self.identity = "\n".join(parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return np.concatenate(
            [
                start + _rows_in_turn(len(self.tables[name]), self.counts[name], epoch, (seed, number))
                for number, (name, start) in enumerate(zip(self._names, self._starts[:-1], strict=True))
            ]
        )

    def record(self, index: int) -> tuple[dict, Path]:
        name, row = self._at(index)
        return self.tables[name].record(row)

    def origin(self, index: int) -> tuple[str, int]:
        name, row = self._at(index)
        return self.tables[name].origin(row)

    def key(self, index: int) -> str:
        name, row = self._at(index)
        return f"{name}-{self.tables[name].key(row)}"

    def _at(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._names[number], index - int(self._starts[number])


def _rows_in_turn(rows: int, count: int, epoch: int, seed: Sequence[int]) -> ndarray:
    """Entries epoch·count … (epoch + 1)·count of the passes over `rows` rows, end to end."""
    begin, end = epoch * count, (epoch + 1) * count
    passes = range(begin // rows, -(-end // rows))
    orders = [np.random.default_rng([*seed, number]).permutation(rows) for number in passes]
    return np.concatenate(orders)[begin - passes.start * rows :][:count]


# -- opening


def open_table(
    path: str | Path,
    split: str | None = None,
    *,
    layout: Layout | None = None,
    media_dir: str | Path | None = None,
    datasets: Sequence[str] = (),
    kind: str | None = None,
    subset: str | None = None,
) -> Table:
    """The rows of `path`: JSON(L), a meta file, or what `datasets` opens (folder, parquet, arrow, hub name).

    layout      of its records
    media_dir   the folder that paths of media are relative to and may not leave; default: the source's own
    datasets    those of a meta file to read; default: all
    kind        of TABLES; default: told by the name and the first bytes

    Raises ValueError, FileNotFoundError and what `datasets` raises for a source that cannot be read.
    """
    kind = kind or kind_of(path)
    if kind not in TABLES:
        raise ValueError(f"data: {path}: no source is called {kind}{suggestion(kind, TABLES)}")
    if datasets and kind != "meta":
        raise ValueError(f"data.datasets: {path} is no meta file of several datasets; drop the setting.")
    if media_dir is not None and not Path(media_dir).is_dir():
        raise FileNotFoundError(f"data.media_dir: {media_dir} is not a folder.")
    root = None if media_dir is None else Path(media_dir)
    return TABLES[kind](path, split, layout or Layout(), root, datasets, subset)


def kind_of(path: str | Path) -> str:
    """Which of TABLES reads `path`."""
    path = Path(path)
    if path.suffix in FILES and not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist.")
    if not path.is_file() or path.suffix in (".parquet", ".arrow"):
        return "hf"
    if path.suffix != ".json":
        return "jsonl"
    with path.open("rb") as file:
        if file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return "json"
    return "jsonl" if _read_meta(path) is None else "meta"


def source_splits(path: str | Path) -> list[str]:
    """The splits that a source has of its own; empty for one that is whole."""
    if kind_of(path) != "hf":
        return []
    from megatron_vlm.data.hf_rows import split_names

    return split_names(path)


def _open_hf(path, split, layout: Layout, root: Path | None, datasets, subset) -> HFTable:
    from megatron_vlm.data.hf_rows import media_root, open_rows

    return HFTable(str(path), open_rows(path, split, subset), root or media_root(path), layout)


def _open_json(path, split, layout: Layout, root: Path | None, datasets, subset, lines=False) -> JsonTable:
    return JsonTable(Path(path), root or Path(path).parent, layout, lines)


def _open_meta(path, split, layout: Layout, root: Path | None, datasets: Sequence[str], subset) -> Blend:
    """A file {name: {file_name, columns, tags, media_dir, sample_ratio, ...}, ...}."""
    path = Path(path)
    if layout.columns or layout.tags:
        raise ValueError(f"data.columns: {path} says the columns of each of its datasets; drop the setting.")
    entries = _read_meta(path)
    if not entries:
        raise ValueError(f"{path}: not a meta file; expected {{name: {{file_name: ..., ...}}, ...}}.")
    for name in datasets:
        if name not in entries:
            raise ValueError(f"data.datasets: {path} has no dataset {name}{suggestion(name, entries)}")
    entries = {name: entries[name] for name in datasets or entries}
    tables, counts = {}, {}
    for name, entry in entries.items():
        place = f"{path}, dataset {name}"
        tables[name] = _open_entry(path.parent, place, entry, root)
        counts[name] = _rows_in_an_epoch(place, entry, len(tables[name]))
    return Blend(tables, counts)


def _open_entry(folder: Path, place: str, entry: dict, root: Path | None) -> Table:
    for key in entry.keys() - META_KEYS:
        raise ValueError(f"{place}: {key} is no setting that is read{suggestion(key, sorted(META_KEYS))}")
    if entry.get("ranking"):
        raise ValueError(f"{place}: ranking data has no replies to train on; leave the dataset out.")
    if (formatting := entry.get("formatting", "sharegpt")) not in FORMATTINGS:
        raise ValueError(f"{place}: formatting {formatting}{suggestion(str(formatting), FORMATTINGS)}")
    try:
        layout = Layout(dict(entry.get("columns") or {}), dict(entry.get("tags") or {}))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    media_dir = folder / entry["media_dir"] if entry.get("media_dir") else root or folder
    if "hf_hub_url" in entry:
        source = entry["hf_hub_url"]
    else:
        source = folder / entry["file_name"]
        if not source.exists():
            raise FileNotFoundError(f"{place}: {source} does not exist.")
        if kind_of(source) == "meta":
            raise ValueError(f"{place}: {source} is a meta file itself; name its datasets here.")
    split = entry.get("split") or _train_split(source)
    table = open_table(source, split, layout=layout, media_dir=media_dir, subset=entry.get("subset"))
    if not len(table):
        raise ValueError(f"{place}: {source} has no records.")
    return table


def _train_split(source: str | Path) -> str | None:
    return "train" if "train" in source_splits(source) else None


def _rows_in_an_epoch(place: str, entry: dict, rows: int) -> int:
    ratio, count = entry.get("sample_ratio"), entry.get("num_samples")
    if ratio is not None and count is not None:
        raise ValueError(f"{place}: sample_ratio {ratio} and num_samples {count}; give one of them.")
    for value in (ratio, count):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{place}: {value!r} rows; give a positive number, or leave the dataset out.")
    return int(count or 0) or max(1, round(rows * (1.0 if ratio is None else ratio)))


def _read_meta(path: Path) -> dict[str, dict] | None:
    """The entries of a meta file; None for a file that is something else."""
    if path.stat().st_size > LARGEST_META:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # JSON Lines, or damaged: reading it line by line will tell
        return None
    is_meta = isinstance(content, dict) and content and all(map(_is_entry, content.values()))
    return content if is_meta else None


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(key), str) for key in META_SOURCES)


TABLES = {
    "hf": _open_hf,
    "json": _open_json,
    "jsonl": functools.partial(_open_json, lines=True),
    "meta": _open_meta,
}
