"""Rows by number: the interface of every map-style source, several sources as one, and rows held out of them.

Rows are held out for validation by a hash of their keys. Whether one is depends on nothing but its key in its
own source and the share: not on order, ranks, workers, seed or other sources. A larger share holds out what a
smaller one does, and more.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.on_disk.paths import DataSource


class Table(ABC):
    """Rows by number, from 0. All of them are in every epoch, each under its number and in its place."""

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

    def parts(self) -> Mapping[str, "Table"]:
        """The tables that it is made of, by name, if there are several sources."""
        return {}

    def place(self, index: int) -> int:
        """The place of a row, as JSON data of a few numbers; `at` gives the rows there."""
        return index

    def at(self, places: Sequence[int]) -> list[int]:
        return list(places)

    def fingerprint(self) -> str:
        """Identifies the rows by their content, so that a dataset may move, but no row may change."""
        return f"{len(self)} rows, content {self.content()}"


@dataclass
class Blend(Table):
    """Several tables, each with the number of its rows in an epoch; `exact` are the tables whose number
    the user gave, as `#n`.

    A table is passed over without end, each pass in a random order; an epoch takes the next rows of these
    passes. So whatever the share, every row comes as often as any other, plus or minus one.
    """

    tables: Mapping[str, Table]
    counts: Mapping[str, int]  # rows in an epoch
    exact: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        self._names = list(self.tables)
        self._starts = np.cumsum([0, *map(len, self.tables.values())])
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

    def record(self, index: int) -> tuple[dict, Path | str]:
        name, row = self._at(index)
        return self.tables[name].record(row)

    def origin(self, index: int) -> tuple[str, int]:
        name, row = self._at(index)
        return self.tables[name].origin(row)

    def parts(self) -> Mapping[str, Table]:
        return self.tables

    def key(self, index: int) -> str:
        """A key unique among the rows of all tables, since the tables' names are unique."""
        name, row = self._at(index)
        return f"{name}-{self.tables[name].key(row)}"

    def content(self) -> str:
        """A digest in the order of the tables, on which seeds depend. Names may change as files move."""
        return digest([[self.counts[name], table.content()] for name, table in self.tables.items()])

    def _at(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._names[number], index - int(self._starts[number])


def sources_of_keys(table: object) -> list[str]:
    """The names that the keys of a table's rows begin with, if it has several parts."""
    names = list(table.parts()) if isinstance(table, Table) else []
    return names if len(names) > 1 else []


def in_turn(table: Table, rows: ndarray) -> ndarray:
    """The rows, given in stored order, so that the parts of a table take turns: the first of each, then the
    second of each, and so on; a part that is over takes none."""
    ends = np.cumsum([len(part) for part in table.parts().values()])
    parts = np.searchsorted(ends, rows, side="right")
    turns = np.arange(len(rows)) - np.searchsorted(parts, parts)
    return rows[np.lexsort((parts, turns))]


def _rows_in_turn(rows: int, count: int, epoch: int, seed: Sequence[int]) -> ndarray:
    """Entries epoch·count … (epoch + 1)·count of the passes over `rows` rows, joined end to end."""
    begin, end = epoch * count, (epoch + 1) * count
    passes = range(begin // rows, -(-end // rows))
    orders = [np.random.default_rng([*seed, number]).permutation(rows) for number in passes]
    return np.concatenate(orders)[begin - passes.start * rows :][:count]


def blend_tables(tables: Mapping[str, Table], sources: Sequence[DataSource]) -> Blend:
    """One table of several, whose sources say how many rows an epoch has of each.

    Raises ValueError for a table without rows.
    """
    parts, counts, exact = {}, {}, set()
    for (name, table), source in zip(tables.items(), sources, strict=True):
        inner, rows = {name: table}, {name: len(table)}
        if isinstance(table, Blend):
            inner = {f"{name}/{part}": of for part, of in table.tables.items()}
            rows = {f"{name}/{part}": count for part, count in table.counts.items()}
        if not len(table):
            raise ValueError(f"data: {name} has no records; leave it out.")
        total = sum(rows.values())
        rows_in_epoch = source.rows_in_an_epoch(total)
        parts |= inner
        exact |= inner.keys() if source.rows else set()
        counts |= {part: max(1, round(count * rows_in_epoch / total)) for part, count in rows.items()}
    return Blend(parts, counts, exact)


def path_names(sources: Sequence[DataSource]) -> list[str]:
    """The name that each source was given, or the last parts of its path, enough for all to differ.

    Raises ValueError for a path that is given twice.
    """
    parts = [PurePosixPath(source.title.rstrip("/")).parts for source in sources]
    for source, path_parts in zip(sources, parts, strict=True):
        if parts.count(path_parts) > 1:
            raise ValueError(f"data: {source.title} is given twice; give it once, as {source.title}*2.")
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]).lstrip("/") for part in parts]


# -- rows that are held out


def is_held_out(key: str, share: float) -> bool:
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def hold_out(table: Table, share: float, held_out: bool) -> Table:
    """The held-out rows, each once in an epoch; or all other rows, as many times as `table` has them,
    unless it says how many rows an epoch has.

    Raises ValueError if no row is held out, or all rows of one of the sources are.
    """
    tables = table.tables if isinstance(table, Blend) else {"": table}
    chosen, trained = {}, {}
    for name, source in tables.items():
        is_chosen = np.array([is_held_out(source.key(row), share) for row in range(len(source))], bool)
        chosen[name] = ChosenRows(source, np.flatnonzero(is_chosen), f"{share} held out")
        trained[name] = ChosenRows(source, np.flatnonzero(~is_chosen), f"without {share} held out")
    # Training needs rows of every source, and validation needs a row of any
    empty = [part for name, part in tables.items() if not trained[name]]
    wrong = [f"all {len(part)} rows of {part.origin(0)[0]}" for part in empty]
    wrong += [] if any(chosen.values()) else [f"none of {len(table)} rows"]
    if wrong:
        raise ValueError(
            f"data.validation_share: {share:g} holds out {wrong[0]}; change it, or give data.valid_data_path."
        )
    if not isinstance(table, Blend):
        return (chosen if held_out else trained)[""]
    # A source keeps its share of an epoch, less what is held out of it
    if held_out:
        some = {name: rows for name, rows in chosen.items() if rows}
        return Blend(some, {name: len(rows) for name, rows in some.items()})
    counts = dict(table.counts)
    for name in counts.keys() - table.exact:
        counts[name] = max(1, round(counts[name] * len(trained[name]) / len(tables[name])))
    return Blend(trained, counts)


@dataclass
class ChosenRows(Table):
    """Some rows of a table, with the keys that they have there."""

    table: Table
    rows: ndarray
    name: str  # which part it is

    def __post_init__(self) -> None:
        self.identity = f"{self.table.identity} {self.name}"

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> tuple[dict, Path | str]:
        return self.table.record(int(self.rows[index]))

    def origin(self, index: int) -> tuple[str, int]:
        return self.table.origin(int(self.rows[index]))

    def content(self) -> str:
        return digest([self.table.content(), self.name])


# -- images in other sizes


@dataclass
class Resized(Table):
    """The rows of a table, each under `count` numbers, one for every size that its images are to have.

    The epochs take these sizes in turn. A number says which size it is, so whatever knows a row's number
    (lengths, orders, keys for replay) knows the size, too.
    """

    table: Table
    count: int
    seed: int

    def __post_init__(self) -> None:
        self.identity = f"{self.table.identity} in {self.count} sizes of seed {self.seed}"

    def __len__(self) -> int:
        return self.count * len(self.table)

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return self.table.rows_of(epoch, seed) + epoch % self.count * len(self.table)

    def sizes(self, index: int) -> str:
        return f"{self.seed} {index // len(self.table)} {self.key(index)}"

    def record(self, index: int) -> tuple[dict, Path | str]:
        return self.table.record(index % len(self.table))

    def origin(self, index: int) -> tuple[str, int]:
        return self.table.origin(index % len(self.table))

    def key(self, index: int) -> str:
        return self.table.key(index % len(self.table))

    def parts(self) -> Mapping[str, Table]:
        return self.table.parts()

    def content(self) -> str:
        return self.table.content()

    def fingerprint(self) -> str:
        return self.table.fingerprint()
