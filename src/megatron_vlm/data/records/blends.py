"""Rows by number: what every map-style source is, and several of them as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy import ndarray

from megatron_vlm.data.fingerprint import digest


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

    def content(self) -> str:
        """A digest of all rows, in their order; the same wherever the files lie."""

    def fingerprint(self) -> str: ...


class Numbered:
    """What all tables share."""

    def fingerprint(self) -> str:
        """Of all rows themselves, so that a dataset may move and not one row may change."""
        return f"{len(self)} rows, content {self.content()}"


class Whole(Numbered):
    """What tables share of which every row is in every epoch."""

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return np.arange(len(self))

    def key(self, index: int) -> str:
        return f"{self.origin(index)[1]:09d}"


@dataclass
class Blend(Numbered):
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
        """Of all rows of all tables a different one, since names are."""
        name, row = self._at(index)
        return f"{name}-{self.tables[name].key(row)}"

    def content(self) -> str:
        """In the order of the tables, which their seeds depend on; names may change as files move."""
        return digest([[self.counts[name], table.content()] for name, table in self.tables.items()])

    def _at(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._names[number], index - int(self._starts[number])


def _rows_in_turn(rows: int, count: int, epoch: int, seed: Sequence[int]) -> ndarray:
    """Entries epoch·count … (epoch + 1)·count of the passes over `rows` rows, end to end."""
    begin, end = epoch * count, (epoch + 1) * count
    passes = range(begin // rows, -(-end // rows))
    orders = [np.random.default_rng([*seed, number]).permutation(rows) for number in passes]
    return np.concatenate(orders)[begin - passes.start * rows :][:count]


def blend_tables(tables: Mapping[str, Table], repetitions: Sequence[float]) -> Blend:
    """One table of several, of each of which an epoch has so many times the rows that its own has.

    Raises ValueError for a table without rows.
    """
    parts, counts = {}, {}
    for (name, table), times in zip(tables.items(), repetitions, strict=True):
        inner, rows = {name: table}, {name: len(table)}
        if isinstance(table, Blend):
            inner = {f"{name}/{part}": of for part, of in table.tables.items()}
            rows = {f"{name}/{part}": count for part, count in table.counts.items()}
        if not len(table):
            raise ValueError(f"data: {name} has no records; leave it out.")
        parts |= inner
        counts |= {part: max(1, round(count * times)) for part, count in rows.items()}
    return Blend(parts, counts)


def path_names(paths: Sequence[str]) -> list[str]:
    """For each path so much of its end that no two are the same.

    Raises ValueError for a path that is given twice.
    """
    parts = [PurePosixPath(str(path).rstrip("/")).parts for path in paths]
    for path, own in zip(paths, parts, strict=True):
        if parts.count(own) > 1:
            raise ValueError(f"data: {path} is given twice; give it once, and how often in data.repetitions.")
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]).lstrip("/") for part in parts]
