"""Hugging Face `datasets`, JSON(L) and meta files as sources, through the same encoder that Energon uses.

Rows stay on disk (Arrow, memory-mapped; JSON, read by position) or come from a stream, and images stay
encoded until a worker encodes the sample. Only seed, epoch, rank and world size decide the order of rows and
what is packed together, so the state is a few numbers and fits any number of workers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from megatron.energon import SkipSample
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.batch import DROPPED, Batch
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import MIN_SAMPLES, BadSample, DropReport, TooManyDrops, lost_samples
from megatron_vlm.data.accounts.fingerprint import encoder_settings
from megatron_vlm.data.chatml.record import Columns, load_media, parse_record, record_id
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.encode.encoder import HFEncoderTaskSample
from megatron_vlm.data.load.base import (
    TrainLoader,
    ValidLoader,
    loader_of,
    order_settings,
    with_limited_drops,
)
from megatron_vlm.data.load.lengths import Measuring, measure_dataset
from megatron_vlm.data.load.sampler import (
    BalancedSampler,
    PackingSampler,
    Sampler,
    ShuffledSampler,
    StreamSampler,
)
from megatron_vlm.data.load.start_notes import sample_sources, start_notes
from megatron_vlm.data.load.workers import raise_naming_samples
from megatron_vlm.data.on_disk.paths import DataSource, items_of, sources_of
from megatron_vlm.data.records.blends import Resized, hold_out, in_turn, sources_of_keys
from megatron_vlm.data.records.datasets import MapDataset
from megatron_vlm.data.records.opening import open_sources, source_splits
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.inputs import attribute_errors_to

VALIDATION_SPLITS = ("val", "validation", "valid")


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
        self._columns = Columns(dict(data.columns), parser=data.parser)

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
        measure = Measuring(rows, size, data.num_workers)
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
        return self._rows.encoder.make_batch([entry.sample for entry in entries])

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


# -- rows and the workers that encode them


class EncodedEntry(NamedTuple):
    """An entry of an order as a worker gives it back."""

    position: Any  # where the order goes on after it
    sample: HFEncoderTaskSample | None  # its rows' documents as one; None if all were dropped
    dropped: dict[int, str]  # the number of each dropped row in the entry, and the reason


class EncodedRows(Dataset):
    """Encodes the entries of an order. A row is its number in the table, or what the stream gave."""

    def __init__(self, table: MapDataset | StreamedRows, encoder) -> None:
        self.table, self.encoder = table, encoder

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, entry: tuple[Any, list]) -> EncodedEntry:
        position, indices = entry
        encoded, dropped = [], {}
        for number, index in enumerate(indices):
            try:
                encoded.append(self._encode_named(self.encoder.encode_document, index))
            except SkipSample as skipped:
                if not isinstance(bad := skipped.__cause__, BadSample):  # the encoder counts it, and says so
                    raise lost_samples(
                        [self.table.key(index)], "skipped without being counted as dropped"
                    ) from skipped
                dropped[number] = bad.reason
        if not encoded:
            return EncodedEntry(position, None, dropped)
        places = [document.__restore_key__ for document in encoded]
        row = self.encoder.join(encoded)
        row.__restore_key__ = places
        return EncodedEntry(position, row, dropped)

    def measured(self, index: int) -> tuple[int, int] | None:
        """(tokens, patches) of a row's encoding, None for one that will be dropped, and then be counted."""
        try:
            document = self._encode_named(self.encoder.documents.measure, index)
        except BadSample:
            return None
        return document.length, document.patches

    def _encode_named(self, encode: Callable[[ChatMLSample], Any], index: int) -> Any:
        try:
            return encode(self.sample(index))
        except (BadSample, SkipSample, TooManyDrops):
            raise
        except Exception as error:  # noqa: BLE001 - raised again
            raise_naming_samples(error, [self.table.key(index)])

    def sample(self, index: int) -> ChatMLSample:
        """The row as Energon's cooker would give it; `problem` tells the encoder what is wrong with it."""
        keys = self.table.sample_keys(index)
        try:
            record, root = self.table.record(index)
            keys["record_id"] = record_id(record)
            conversation = parse_record(record)
            images, videos = load_media(conversation, root)
            sample = make_sample(conversation, images, videos, **keys)
        except BadSample as bad:
            return ChatMLSample(problem=self._with_place(bad, index), **keys)
        if sample.no_reply is not None:
            sample.no_reply = self._with_place(sample.no_reply, index)
        return sample

    def _with_place(self, bad: BadSample, index: int) -> BadSample:
        source, number = self.table.origin(index)
        return BadSample(bad.reason, f"{source}, record {number}: {bad.detail}")

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.table.fingerprint()


class RowLoader:
    """Micro batches of the entries of an order, which data workers encode.

    Every row that a worker is asked for comes back, in a sample or counted as dropped: one that is missing,
    doubled or in another's place raises LostSample.

    Args:
        rows: Encodes an entry.
        order: `(position, rows)` in the order of training.
        num_workers: Processes that encode; 0 for this one.
    """

    def __init__(self, rows: EncodedRows, order: Iterable[tuple[Any, Sequence]], num_workers: int) -> None:
        self._rows = rows
        self._order = order
        self._expected: deque[tuple[Any, list[str]]] = deque()  # positions, and the keys of their rows
        self.workers = loader_of(rows, self, num_workers)

    def __iter__(self) -> Iterator[tuple[Any, Sequence]]:
        """The entries of the order, as the workers are asked for them: this is their sampler."""
        for position, rows in self._order:
            self._expected.append((position, [self._rows.table.key(row) for row in rows]))
            yield position, rows

    def entries(self) -> Iterator[EncodedEntry]:
        """The entries as they come back, in their order."""
        for entry in self.workers:
            self._check_delivery(entry)
            yield entry
        if self._expected:
            raise lost_samples(
                [key for _, keys in self._expected for key in keys], "not given back by workers"
            )

    def batches(self, entries: Iterable[EncodedEntry], size: int) -> Iterator[tuple[Any, Batch | dict]]:
        """The position after a batch of `size` samples, and the batch; at last, what is left of both."""
        samples: list[HFEncoderTaskSample] = []
        dropped: Counter[str] = Counter()
        for entry in entries:
            dropped.update(entry.dropped.values())
            if entry.sample is not None:
                samples.append(entry.sample)
            if len(samples) == size:
                yield entry.position, self._rows.encoder.make_batch(samples) | {DROPPED: dropped}
                samples = []
                dropped = Counter()
        last_batch = self._rows.encoder.make_batch(samples) if samples else {}
        yield None, last_batch | {DROPPED: dropped}

    def entries_of_epochs(self, position: Sequence[int], drops: DropReport) -> Iterator[EncodedEntry]:
        """The entries from `position` on, which begins with an epoch and how much of it is done.

        Raises TooManyDrops when a whole epoch of this rank had nothing to train on and at least MIN_SAMPLES
        were dropped. The rank would read on without a batch, and all others would wait without end.
        """
        epoch = position[0]
        has_sample = False
        dropped = 0
        # ends of epochs since the last sample; the beginning of the first counts
        ends = int(not any(position[1:]))
        for entry in self.entries():
            has_sample = has_sample or entry.sample is not None
            dropped += len(entry.dropped)
            if entry.position[0] != epoch:
                ends = 0 if has_sample else ends + entry.position[0] - epoch
                dropped = 0 if has_sample else dropped
                epoch = entry.position[0]
                has_sample = False
                if ends > 1 and dropped >= MIN_SAMPLES:
                    drops.epoch_was_dropped(dropped)
                    drops.check()
            yield entry

    def _check_delivery(self, entry: EncodedEntry) -> None:
        position, keys = self._expected.popleft() if self._expected else (None, [])
        documents = self._rows.encoder.documents.per_sample
        kept = [key for n, key in enumerate(keys) if n not in entry.dropped for _ in range(documents)]
        delivered = [] if entry.sample is None else entry.sample.document_keys
        if (entry.position, delivered) != (position, kept):
            wrong = keys if entry.position != position else sorted(set(kept) ^ set(delivered)) or kept
            gave = f"workers gave {delivered} at {entry.position} where {kept} at {position} were due"
            raise lost_samples(wrong or delivered, gave)
