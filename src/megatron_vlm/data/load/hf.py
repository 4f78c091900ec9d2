"""Hugging Face `datasets`, JSON(L) and meta files as sources, through the same encoder that Energon uses.

Rows stay on disk (Arrow, memory-mapped; JSON, read by position) or come from a stream, and images stay
encoded until a worker encodes the sample. Only seed, epoch, rank and world size decide the order of rows and
what is packed together, so the state is a few numbers and fits any number of workers.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from xxhash import xxh3_64_digest

from megatron_vlm.batch import Batch
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import lost_samples
from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.chatml.columns import Columns
from megatron_vlm.data.load.base import TrainLoader, ValidLoader, order_settings, with_limited_drops
from megatron_vlm.data.load.rows import EncodedRows, RowLoader
from megatron_vlm.data.load.sampler import (
    BalancedSampler,
    Measured,
    PackingSampler,
    Position,
    Sampler,
    ShuffledSampler,
    StreamSampler,
)
from megatron_vlm.data.load.start_notes import sample_sources, start_notes
from megatron_vlm.data.load.workers import close_loader, loader_of
from megatron_vlm.data.on_disk.paths import DataSource, items_of, sources_of
from megatron_vlm.data.records.blends import Resized, hold_out, in_turn, sources_of_keys
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.data.records.tables import open_sources, source_splits
from megatron_vlm.files import add_path_to_errors, atomic_write, read_file
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.job import watchdog
from megatron_vlm.messages import printable

PART = 1000  # rows in a file
DROPPED = -1


def measure_dataset(
    rows, folder: str | Path | None = None, num_workers: int = 0, rank: int = 0, world_size: int = 1
) -> tuple[ndarray, ndarray]:
    """(tokens, patches) of each row of an `EncodedRows`; DROPPED for a row that is dropped.

    Reads the parts that `folder` has and measures the rest, with a progress bar on rank 0. Ranks begin with
    different parts; a rank measures the parts of others too if they are missing, so no rank waits.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    settings = encoder_settings(rows.encoder)
    key = digest([rows.fingerprint, rows.table.identity, settings, transformers.__version__])
    folder = Path(folder or cache / "megatron_vlm" / "lengths") / key
    with add_path_to_errors(folder, "set data.lengths_cache to a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts(rows, folder)
    missing = [number for number in range(len(parts)) if parts.read(number) is None]
    if (damaged := sum(parts.path(number).exists() for number in missing)) and not rank:
        tqdm.write(printable(f"data.lengths_cache: {damaged} damaged files of {folder} are measured again"))
    # each rank begins elsewhere, so that ranks together measure every part once
    missing.sort(key=lambda number: (number - rank) % world_size)
    loader = loader_of(parts, missing, num_workers if missing else 0)
    done = len(parts) - len(missing)
    quiet = rank > 0 or not missing
    for _ in tqdm(loader, "measuring", len(parts), unit=f" x {PART} rows", initial=done, disable=quiet):
        watchdog.beat()
    tokens, patches = np.concatenate([parts.read(number) for number in range(len(parts))]).T
    return tokens, patches


class _Parts(Dataset):
    """Measures a part, by its number, if its file is missing or damaged. A file has a checksum before the
    numbers."""

    def __init__(self, rows, folder: Path) -> None:
        self._rows, self._folder = rows, folder

    def __len__(self) -> int:
        return -(-len(self._rows) // PART)

    def __getitem__(self, number: int) -> None:
        if self.read(number) is None:
            costs = [self._rows.measured(index) or (DROPPED, DROPPED) for index in self._indices(number)]
            content = np.array(costs, "<i4").tobytes()
            atomic_write(self.path(number), xxh3_64_digest(content) + content)

    def path(self, number: int) -> Path:
        return self._folder / f"{number * PART:012d}.lengths"

    def read(self, number: int) -> ndarray | None:
        """(tokens, patches) of each row of a part; None if its file is missing or is not what was written."""
        try:
            raw = read_file(self.path(number))
        except (OSError, ValueError):
            return None
        is_whole = len(raw) == 8 * (1 + len(self._indices(number))) and xxh3_64_digest(raw[8:]) == raw[:8]
        return np.frombuffer(raw[8:], "<i4").reshape(-1, 2) if is_whole else None

    def _indices(self, number: int) -> range:
        return range(number * PART, min((number + 1) * PART, len(self._rows)))


VALIDATION_SPLITS = ("val", "validation", "valid")
MEASURED_AT_ONCE = 25  # rows that a worker measures before it hands them over


class HFProvider:
    """Loaders of a folder in `datasets` format, parquet, a hub name, JSON(L), or a meta file of several.

    An epoch has the rows of each path once, or as many as the path's `DataSource` says. With
    1.5, a row comes once or twice in an epoch, and over all epochs as often as the path's others.

    With `streaming`, `StreamSampler` says how training rows come, shuffled within `shuffle_buffer_size`.
    With `packing` the training loader's encoder must be a PackingVLMTaskEncoder. "global" packing and
    `group_by_length` measure the whole dataset when the training loader is built, once for all runs that
    share `lengths_cache`.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._columns = Columns(dict(data.columns))

    def train_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int
    ) -> HFTrainLoader:
        """An endless, savable loader; each epoch has a new order. `rank` and `world_size` are
        data-parallel. Raises ValueError if there are fewer rows than ranks.
        """
        data = self._data
        if data.streaming:
            [source] = sources_of(data.train_data_path)  # `validate` refuses several
            table = StreamedRows.open(source.path, self._columns, data.media_dir)
            table.sizes_in_turn = data.resize_jitter
            table.seed = seed
            rows = EncodedRows(table, with_limited_drops(encoder, data))
        else:
            rows = self.train_rows(encoder, seed)
            if (count := len(rows.table.rows_of(0, seed))) < world_size:
                paths = ", ".join(items_of(data.train_data_path))
                raise ValueError(
                    f"data: {paths} has {count} rows for {world_size} data-parallel ranks; use fewer ranks "
                    "or more data."
                )
            rows.encoder.drops.epoch = count
        settings = order_settings(data, micro_batch_size, seed) | {
            "dataset": rows.fingerprint,
            "rank": rank,
            "world_size": world_size,
            "group_by_length": data.group_by_length,
            "shuffle_buffer_size": data.shuffle_buffer_size if data.streaming else None,
        }
        sampler = self._sampler(rows, micro_batch_size, rank, world_size, seed)
        settings |= sampler.settings()
        return HFTrainLoader(rows, sampler, micro_batch_size, data.num_workers, settings)

    def train_rows(self, encoder, seed: int, held_out: bool = False) -> EncodedRows:
        """The trained rows of the training paths, or their held-out rows.

        Trained rows are there once for each size that their images are to have.
        """
        share = self._data.validation_share
        sources = sources_of(self._data.train_data_path)
        splits = [source_splits(source.path, source.subset) for source in sources]
        for source in sources if share else ():
            if split := _validation_split(source):
                raise ValueError(
                    f"data.validation_share: {source.path} has a validation split already, {split!r}; drop "
                    "the setting to validate on it."
                )
        train_splits = ["train" if "train" in names else None for names in splits]
        trained = list(zip(sources, train_splits, strict=True))
        rows = self._rows(trained, encoder, self._data.datasets)
        rows.table = hold_out(rows.table, share, held_out) if share else rows.table
        if self._data.resize_jitter and not held_out:
            rows.table = Resized(rows.table, self._data.resize_jitter, seed)
        return rows

    def _sampler(
        self, rows: EncodedRows, micro_batch_size: int, rank: int, world_size: int, seed: int
    ) -> Sampler:
        data = self._data
        if data.streaming:
            sampler = StreamSampler(rows.table, rank, world_size, seed, data.shuffle_buffer_size)
        else:
            rows_of = functools.partial(rows.table.rows_of, seed=seed)
            sampler = ShuffledSampler(rows_of, rank, world_size, seed)
        if data.packing == "global" or data.group_by_length:
            tokens, patches = measure_dataset(rows, data.lengths_cache, data.num_workers, rank, world_size)
            capacity = rows.encoder.data.seq_length if data.packing == "global" else None
            max_patches = rows.encoder.data.max_patches
            return BalancedSampler(
                rows_of, tokens, patches, rank, world_size, micro_batch_size, seed, capacity, max_patches
            )
        if data.packing == "none":
            return sampler
        size = data.packing_buffer_size
        measure = _Measuring(rows, size, data.num_workers)
        return PackingSampler(sampler, size, measure, rows.encoder.select_rows, (*sampler.position, 0))

    def valid_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int = 0
    ) -> HFValidLoader | None:
        """A finite loader of `valid_rows` in stored order, several sources in turn: each row on exactly one
        rank, as many batches on every rank. None if there are none."""
        if (named_rows := self.valid_rows(encoder, seed)) is None:
            return None
        return HFValidLoader(
            named_rows[0], named_rows[1], rank, world_size, micro_batch_size, self._data.num_workers
        )

    @attribute_errors_to("self._data.valid_data_path")
    def valid_rows(self, encoder, seed: int = 0) -> tuple[str, EncodedRows] | None:
        """(what is read, for messages; the rows that are validated on). It never streams; of a meta file
        these are the rows of the first epoch; with `validation_share`, those that are held out.

        None if no validation path is set and the training dataset has no validation split, or is streamed.
        """
        data = self._data
        if data.streaming and data.valid_data_path is None:
            return None
        if data.validation_share:
            return "data.validation_share: what is held out", self.train_rows(encoder, seed, held_out=True)
        key = "train_data_path" if data.valid_data_path is None else "valid_data_path"
        splits = [(source, _validation_split(source)) for source in sources_of(getattr(data, key))]
        if data.valid_data_path is None:  # all rows of the splits, however many rows are trained
            splits = [(replace(source, rows=None, share=None), split) for source, split in splits if split]
        if not splits:
            return None
        paths = ", ".join(f"{source.path} ({split})" if split else source.path for source, split in splits)
        rows = self._rows(splits, encoder, data.datasets if data.valid_data_path is None else ())
        return f"data.{key}: {paths}", rows

    def _rows(
        self, splits: list[tuple[DataSource, str | None]], encoder, names: Sequence[str]
    ) -> EncodedRows:
        table = open_sources(splits, columns=self._columns, media_dir=self._data.media_dir, datasets=names)
        return EncodedRows(table, with_limited_drops(encoder, self._data))


def _validation_split(source: DataSource) -> str | None:
    names = source_splits(source.path, source.subset)
    return next((name for name in VALIDATION_SPLITS if name in names), None)


class _Measuring(Dataset):
    """Called with a sampler: what each of its rows costs. Workers measure up to a buffer ahead."""

    def __init__(self, rows: EncodedRows, buffer_size: int, num_workers: int) -> None:
        self._rows, self._num_workers = rows, num_workers
        self._ahead = -(-buffer_size // (MEASURED_AT_ONCE * max(1, num_workers)))
        self._loader: DataLoader | None = None

    def __call__(self, sampler: ShuffledSampler | StreamSampler) -> Iterator[Measured]:
        self.close()
        pieces, handed_out = itertools.tee(itertools.batched(sampler, MEASURED_AT_ONCE))
        self._loader = loader_of(self, handed_out, self._num_workers, self._ahead)
        return self._check_measures(pieces)

    def _check_measures(self, pieces: Iterator[tuple[tuple[Position, list[int]], ...]]) -> Iterator[Measured]:
        """The measures of the workers. Raises LostSample if they are not of the rows that were asked for."""
        key = self._rows.table.key
        for measured, piece in zip(self._loader, pieces, strict=True):
            expected = [(place, key(row)) for place, [row] in piece]
            if [position_and_key for position_and_key, _ in measured] != expected:
                raise lost_samples([key for _, key in expected], "not measured by the worker asked to")
            for (place, [row]), (_, costs) in zip(piece, measured, strict=True):
                yield place, row, costs

    def __getitem__(self, piece: tuple[tuple[Position, list], ...]) -> list[tuple[tuple[Position, str], Any]]:
        return [((place, self._rows.table.key(row)), self._rows.measured(row)) for place, [row] in piece]

    def close(self) -> None:
        if self._loader is not None:
            close_loader(self._loader)


class HFTrainLoader(TrainLoader):
    """The base's loader over a table or stream. A new number of ranks shares what the old ranks had left of
    their epochs; only a stream needs the same number."""

    def __init__(
        self, rows: EncodedRows, sampler: Sampler, micro_batch_size: int, num_workers: int, settings: dict
    ) -> None:
        super().__init__(rows.encoder.drops, settings | encoder_settings(rows.encoder))
        self._rows = rows
        self._sampler = sampler
        self._micro_batch_size = micro_batch_size
        self.sources = sources_of_keys(rows.table)
        if settings["rank"] == 0 or not isinstance(rows.table, StreamedRows):  # a hub answers one rank
            self.notes = start_notes(sample_sources(rows.table), rows.encoder)
        self._row_loader = RowLoader(rows, sampler, num_workers)
        self._loader = self._row_loader.workers
        self._position = sampler.position

    def _make_batches(self) -> Iterator[Batch]:
        entries = self._row_loader.entries_of_epochs(self._position, self._drops)
        for position, batch in self._row_loader.batches(entries, self._micro_batch_size):
            self._position = position
            yield batch

    def state_dict(self) -> dict:
        return self._state(place=list(self._position), moves=self._sampler.reshards)

    def load_state_dict(self, state: dict) -> None:
        self._check(state)
        self._sampler.reshards = state["moves"]
        self._position = self._sampler.position = tuple(state["place"])

    def load_states(self, states: list[dict]) -> None:
        place = {name: self.fingerprint[name] for name in ("rank", "world_size")}
        if len(states) == place["world_size"]:
            return self.load_state_dict(states[place["rank"]])
        self._check(states[0], **(place if self._sampler.supports_resharding else {}))
        self._sampler.reshards = states[0]["moves"]
        self._sampler.reshard([state["place"] for state in states])
        self._position = self._sampler.position

    def rows_in(self, epochs: int) -> int | None:
        return self._sampler.rows_in(epochs)

    def replay(self, restore_key: list[list]) -> Batch:
        table = self._rows.table
        flat = iter(table.at([place for places in restore_key for place in places]))
        rows = [list(itertools.islice(flat, len(places))) for places in restore_key]
        entries = [self._rows[None, row] for row in rows]
        numbers = [
            (row, number) for row, entry in zip(rows, entries, strict=True) for number in entry.dropped
        ]
        if dropped := [table.key(row[number]) for row, number in numbers]:
            raise ValueError(f"replay: {dropped}, once trained on, are dropped; the dataset has changed.")
        return self._rows.batch([entry.sample for entry in entries])

    def close(self) -> None:
        super().close()
        self._sampler.close()


class HFValidLoader(ValidLoader):
    """The base's loader over a table; a share is a list of row numbers. The first batches have rows of every
    source."""

    def __init__(
        self,
        name: str,
        rows: EncodedRows,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        num_workers: int,
    ) -> None:
        self.name, self._encoder, self._table = name, rows.encoder, rows.table
        self._micro_batch_size = micro_batch_size
        self._num_workers = num_workers
        self._full_share = in_turn(rows.table, np.sort(rows.table.rows_of(0, 0))).tolist()
        self._rank_share = self._full_share[rank::world_size]
        self.sources = sources_of_keys(rows.table)
        most_rows = -(-len(self._full_share) // world_size)
        super().__init__(rows.encoder.drops, -(-most_rows // self._micro_batch_size))

    def keys(self) -> list[str]:
        """The keys of all rows, over all ranks."""
        return [self._table.key(row) for row in self._full_share]

    def _select_source(self, source: str) -> None:
        ends = np.cumsum([0, *map(len, self._table.parts().values())])
        number = self.sources.index(source)
        self._rank_share = [row for row in self._rank_share if ends[number] <= row < ends[number + 1]]

    def _open(self) -> DataLoader:
        rows = EncodedRows(self._table, self._encoder)
        order = [(None, [index]) for index in self._rank_share]
        self._row_loader = RowLoader(rows, order, self._num_workers)
        return self._row_loader.workers

    def _batches(self, loader: DataLoader) -> Iterator[Batch | dict]:
        entries = self._row_loader.entries()
        return (batch for _, batch in self._row_loader.batches(entries, self._micro_batch_size))
