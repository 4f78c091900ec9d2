"""Several datasets blended into one, validation splits, and images in several sizes.

Rows are held out for validation by a hash of their keys. Whether one is depends on nothing but its key in its
own source and the share: not on order, ranks, workers, seed or other sources. A larger share holds out what a
smaller one does, and more.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy import ndarray

from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.on_disk.paths import DataSource
from megatron_vlm.data.records.datasets import MapDataset


@dataclass
class Blend(MapDataset):
    """Several datasets, each with the number of its rows in an epoch; `exact` are the datasets whose number
    the user gave, as `#n`.

    A dataset is passed over without end, each pass in a random order; an epoch takes the next rows of these
    passes. So whatever the share, every row comes as often as any other, plus or minus one.
    """

    datasets: Mapping[str, MapDataset]
    counts: Mapping[str, int]  # rows in an epoch
    exact: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        self._names = list(self.datasets)
        self._starts = np.cumsum([0, *map(len, self.datasets.values())])
        parts = [f"{name} {self.counts[name]} {dataset.identity}" for name, dataset in self.datasets.items()]
        self.identity = "\n".join(parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return np.concatenate(
            [
                start + _rows_in_turn(len(self.datasets[name]), self.counts[name], epoch, (seed, number))
                for number, (name, start) in enumerate(zip(self._names, self._starts[:-1], strict=True))
            ]
        )

    def record(self, index: int) -> tuple[dict, Path | str]:
        name, row = self._at(index)
        return self.datasets[name].record(row)

    def origin(self, index: int) -> tuple[str, int]:
        name, row = self._at(index)
        return self.datasets[name].origin(row)

    def parts(self) -> Mapping[str, MapDataset]:
        return self.datasets

    def key(self, index: int) -> str:
        """A key unique among the rows of all datasets, since the datasets' names are unique."""
        name, row = self._at(index)
        return f"{name}-{self.datasets[name].key(row)}"

    def content(self) -> str:
        """A digest in the order of the datasets, on which seeds depend. Names may change as files move."""
        return digest([[self.counts[name], dataset.content()] for name, dataset in self.datasets.items()])

    def _at(self, index: int) -> tuple[str, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._names[number], index - int(self._starts[number])


def sources_of_keys(dataset: object) -> list[str]:
    """The names that the keys of a dataset's rows begin with, if it has several parts."""
    names = list(dataset.parts()) if isinstance(dataset, MapDataset) else []
    return names if len(names) > 1 else []


def in_turn(dataset: MapDataset, rows: ndarray) -> ndarray:
    """The rows, given in stored order, so that the parts of a dataset take turns: the first of each, then the
    second of each, and so on; a part that is over takes none."""
    ends = np.cumsum([len(part) for part in dataset.parts().values()])
    parts = np.searchsorted(ends, rows, side="right")
    turns = np.arange(len(rows)) - np.searchsorted(parts, parts)
    return rows[np.lexsort((parts, turns))]


def _rows_in_turn(rows: int, count: int, epoch: int, seed: Sequence[int]) -> ndarray:
    """Entries epoch·count … (epoch + 1)·count of the passes over `rows` rows, joined end to end."""
    begin, end = epoch * count, (epoch + 1) * count
    passes = range(begin // rows, -(-end // rows))
    orders = [np.random.default_rng([*seed, number]).permutation(rows) for number in passes]
    return np.concatenate(orders)[begin - passes.start * rows :][:count]


def blend_datasets(datasets: Mapping[str, MapDataset], sources: Sequence[DataSource]) -> Blend:
    """One dataset of several, whose sources say how many rows an epoch has of each.

    Raises ValueError for a dataset without rows.
    """
    parts, counts, exact = {}, {}, set()
    for (name, dataset), source in zip(datasets.items(), sources, strict=True):
        inner, rows = {name: dataset}, {name: len(dataset)}
        if isinstance(dataset, Blend):
            inner = {f"{name}/{part}": of for part, of in dataset.datasets.items()}
            rows = {f"{name}/{part}": count for part, count in dataset.counts.items()}
        if not len(dataset):
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


def hold_out(dataset: MapDataset, share: float, held_out: bool) -> MapDataset:
    """The held-out rows, each once in an epoch; or all other rows, as many times as `dataset` has them,
    unless it says how many rows an epoch has.

    Raises ValueError if no row is held out, or all rows of one of the sources are.
    """
    datasets = dataset.datasets if isinstance(dataset, Blend) else {"": dataset}
    chosen, trained = {}, {}
    for name, source in datasets.items():
        is_chosen = np.array([is_held_out(source.key(row), share) for row in range(len(source))], bool)
        chosen[name] = Subset(source, np.flatnonzero(is_chosen), f"{share} held out")
        trained[name] = Subset(source, np.flatnonzero(~is_chosen), f"without {share} held out")
    # Training needs rows of every source, and validation needs a row of any
    empty = [part for name, part in datasets.items() if not trained[name]]
    wrong = [f"all {len(part)} rows of {part.origin(0)[0]}" for part in empty]
    wrong += [] if any(chosen.values()) else [f"none of {len(dataset)} rows"]
    if wrong:
        raise ValueError(
            f"data.validation_share: {share:g} holds out {wrong[0]}; change it, or give data.valid_data_path."
        )
    if not isinstance(dataset, Blend):
        return (chosen if held_out else trained)[""]
    # A source keeps its share of an epoch, less what is held out of it
    if held_out:
        some = {name: rows for name, rows in chosen.items() if rows}
        return Blend(some, {name: len(rows) for name, rows in some.items()})
    counts = dict(dataset.counts)
    for name in counts.keys() - dataset.exact:
        counts[name] = max(1, round(counts[name] * len(trained[name]) / len(datasets[name])))
    return Blend(trained, counts)


@dataclass
class Subset(MapDataset):
    """Some rows of a dataset, with the keys that they have there."""

    dataset: MapDataset
    rows: ndarray
    name: str  # which part it is

    def __post_init__(self) -> None:
        self.identity = f"{self.dataset.identity} {self.name}"

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> tuple[dict, Path | str]:
        return self.dataset.record(int(self.rows[index]))

    def origin(self, index: int) -> tuple[str, int]:
        return self.dataset.origin(int(self.rows[index]))

    def content(self) -> str:
        return digest([self.dataset.content(), self.name])


# -- images in other sizes


@dataclass
class Resized(MapDataset):
    """The rows of a dataset, each under `count` indices, one for every size that its images are to have.

    The epochs take these sizes in turn. A number says which size it is, so whatever knows a row's number
    (lengths, orders, keys for replay) knows the size, too.
    """

    dataset: MapDataset
    count: int
    seed: int

    def __post_init__(self) -> None:
        self.identity = f"{self.dataset.identity} in {self.count} sizes of seed {self.seed}"

    def __len__(self) -> int:
        return self.count * len(self.dataset)

    def rows_of(self, epoch: int, seed: int) -> ndarray:
        return self.dataset.rows_of(epoch, seed) + epoch % self.count * len(self.dataset)

    def sizes(self, index: int) -> str:
        return f"{self.seed} {index // len(self.dataset)} {self.key(index)}"

    def record(self, index: int) -> tuple[dict, Path | str]:
        return self.dataset.record(index % len(self.dataset))

    def origin(self, index: int) -> tuple[str, int]:
        return self.dataset.origin(index % len(self.dataset))

    def key(self, index: int) -> str:
        return self.dataset.key(index % len(self.dataset))

    def parts(self) -> Mapping[str, MapDataset]:
        return self.dataset.parts()

    def content(self) -> str:
        return self.dataset.content()

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()
