"""Map-style datasets on disk: records are read one at a time by index, from any process.

All of them give what `data.chatml.record` reads: a record with the package's column names, and the folder
under which its media lie.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, decoded, unique_keys
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.rows_file import REPAIR, is_conversation, lines_file, on_disk, record_places
from megatron_vlm.files import open_file

CHECKED_RECORDS = 1000  # the first ones: one must be there, and every mapped column must occur


class MapDataset(ABC):
    """Records by index, from 0. An index always means the same record, and every epoch has all of them."""

    identity: str  # changes with the data, as far as can be told without reading it

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, index: int) -> tuple[dict, Path | str]:
        """A record with the package's column names, and its media root. Raises BadSample."""

    @abstractmethod
    def origin(self, index: int) -> tuple[str, int]:
        """File or dataset, and the record's number in it (JSONL lines count from 0, blank lines included)."""

    @abstractmethod
    def content(self) -> str:
        """A digest of all rows in their order, the same wherever the files lie."""

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        """The rows of an epoch, in no particular order; every epoch has equally many."""
        return np.arange(len(self))

    def key(self, index: int) -> str:
        return f"{self.origin(index)[1]:09d}"

    def sizes(self, index: int) -> str | None:
        """The text that the sizes of a row's images are drawn from; None: they are not drawn."""
        return None

    def parts(self) -> Mapping[str, MapDataset]:
        """The datasets that it is made of, by name, if there are several sources."""
        return {}

    def sample_keys(self, index: int) -> dict[str, Any]:
        """The fields that identify a row's sample: its key, its place, and what its sizes are drawn from.

        A place is JSON data of a few numbers; `at` gives the rows there.
        """
        return {"__key__": self.key(index), "__restore_key__": index, "sizes": self.sizes(index)}

    def at(self, places: Sequence[int]) -> list[int]:
        return list(places)

    def fingerprint(self) -> str:
        """Identifies the rows by their content, so that a dataset may move, but no row may change."""
        return f"{len(self)} rows, content {self.content()}"


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
        self._file = open_file(lines_file(path, unique_keys))
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
        return self.columns(self._text(index)), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return self.name, int(self._numbers[index])

    def _columns_of(self, index: int) -> set[str]:
        """Return the keys of a record as it is stored; none if it is no record."""
        try:
            record = decoded(self._text(index))
        except BadSample:
            return set()
        if is_conversation(record):
            return {"messages"}
        return set(map(str, record)) if isinstance(record, dict) else set()

    def _text(self, index: int) -> bytes:
        start, stop = int(self._starts[index]), int(self._stops[index])
        text = os.pread(self._file.fileno(), stop - start, start)
        if _version(os.fstat(self._file.fileno())) != self._version:
            raise damaged(self.path, "was changed while it was read", "start again, and leave it as it is")
        return text

    def content(self) -> str:
        with open_file(self.path) as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _version(stat: os.stat_result) -> str:
    """Changes when somebody writes into an open file, not when another takes its name."""
    return f"{stat.st_size} {stat.st_mtime_ns}"
