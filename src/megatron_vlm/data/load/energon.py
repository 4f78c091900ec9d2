"""Energon datasets as training and validation loaders.

Energon shards, shuffles, batches and restores; this module adds what it leaves open: a dataset description
that could run code is refused before Energon reads it, buffers are checked to be restorable when the loader
is built, the state is JSON data guarded by a fingerprint, only a BadSample drops a sample, and validation has
equal length on every rank.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.energon import (
    RepeatDataset,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.metadataset import load_dataset
from torch.utils.data import DataLoader

from megatron_vlm.batch import DROPPED, Batch
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample, TooManyDrops
from megatron_vlm.data.accounts.fingerprint import digest, encoder_settings
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.load.base import TrainLoader, ValidLoader, order_settings, with_limited_drops
from megatron_vlm.data.load.energon_safety import (
    check_dataset,
    checked_source,
    guard_readers,
    read_as_data,
    reading_sources,
    split_names,
    walk,
)
from megatron_vlm.data.load.energon_state import (
    as_restored,
    checkpoint_of_worker,
    energon_fingerprint,
    from_json_data,
    to_json_data,
)
from megatron_vlm.data.load.start_notes import read_sample, start_notes
from megatron_vlm.data.load.workers import raise_naming_samples, raise_on_dead_worker, through_arenas
from megatron_vlm.data.on_disk.paths import DataSource, sources_of
from megatron_vlm.data.records.blends import path_names
from megatron_vlm.data.shard_format import cook_record, record_of_parts
from megatron_vlm.inputs import attribute_errors_to

CHECKPOINT_SECONDS = 4  # a restore replays in the workers what came after their last checkpoint
FIRST_RECORDS = 16  # of each source, looked at before the start; they come with their media
FIRST_BATCH_SECONDS = 600  # before the watchdog reports; a large buffer must fill first


class EnergonProvider:
    """Loaders of an Energon dataset or metadataset, or of several of them.

    With several paths, an epoch has every sample of each path once, or as often as its `DataSource` says.
    With `packing="stream"` the training loader's encoder must be a PackingVLMTaskEncoder.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data

    def train_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int
    ) -> EnergonTrainLoader:
        """A shuffled, endless, savable loader; `rank` and `world_size` are data-parallel.

        Raises ValueError for a dataset description that names code, a truncated shard, or fewer samples than
        workers, FileNotFoundError for a missing shard, and AssertionError for an encoder whose buffers could
        not be restored.
        """
        data, sources = self._data, sources_of(self._data.train_data_path)
        packing_buffer_size = data.packing_buffer_size if data.packing == "stream" else None
        encoder = with_limited_drops(encoder, data)
        encoder.sizes_seed = seed if data.resize_jitter else None
        workers = self._worker_config(rank, world_size, seed)
        open_dataset = partial(
            get_train_dataset,
            checked_source(sources, "train"),
            split_part="train",
            batch_size=micro_batch_size,
            packing_buffer_size=packing_buffer_size,
            shuffle_buffer_size=data.shuffle_buffer_size,
            max_samples_per_sequence=data.max_samples_per_sequence,
            task_encoder=encoder,
        )
        with reading_sources(sources), read_as_data(data):
            dataset = open_dataset(worker_config=workers)
        dataset.assert_can_restore()  # else Energon would notice a function without @stateless on resume
        paths = ", ".join(source.path for source in sources)
        with read_as_data(data):
            largest_share, samples = _samples_of_an_epoch(open_dataset, workers, paths)
        encoder.drops.set_share(largest_share, data.shuffle_buffer_size + (packing_buffer_size or 0))
        settings = order_settings(data, micro_batch_size, seed) | {
            "shuffle_buffer_size": data.shuffle_buffer_size,
            "max_samples_per_sequence": data.max_samples_per_sequence,
        }
        rows = samples if data.packing == "none" else None
        loader = EnergonTrainLoader(dataset, workers, encoder, settings, rows)
        loader.sources = path_names(sources) if len(sources) > 1 else []
        if rank == 0:  # the others would read the same records of a store
            looked_at = []
            for source in sources:
                records = EnergonSamples(data, [source], encoder, "train")
                first = range(min(FIRST_RECORDS, len(records)))
                looked_at.append(read_sample(source.path, records, first))
            loader.notes = start_notes(looked_at, encoder)
        return loader

    @attribute_errors_to("self._data.valid_data_path")
    def valid_loader(
        self, encoder, *, micro_batch_size: int, rank: int, world_size: int, seed: int = 0
    ) -> EnergonValidLoader | None:
        """A finite loader in stored order: each sample on exactly one rank, as many batches on every rank.

        None if no validation path is set and the training dataset has no `val` split.
        """
        if not (sources := self._valid_sources()):
            return None
        workers = self._worker_config(rank, world_size, seed)
        encoder = with_limited_drops(encoder, self._data)
        return EnergonValidLoader(self._data, sources, workers, encoder, micro_batch_size)

    @attribute_errors_to("self._data.valid_data_path")
    def valid_samples(self, encoder) -> EnergonSamples | None:
        """The samples of `valid_loader`, by number; None as there."""
        sources = self._valid_sources()
        return EnergonSamples(self._data, sources, encoder) if sources else None

    def _valid_sources(self) -> list[DataSource]:
        data = self._data
        paths = sources_of(data.valid_data_path or data.train_data_path)
        sources = [replace(source, share=None) for source in paths]
        if data.valid_data_path is None:
            for source in sources:
                check_dataset(source.path)
            sources = [source for source in sources if "val" in split_names(source.path)]
        return sources

    def _worker_config(self, rank: int, world_size: int, seed: int) -> WorkerConfig:
        return WorkerConfig(
            rank=rank,
            world_size=world_size,
            num_workers=self._data.num_workers,
            seed_offset=seed,
            global_error_handler=_raise_with_key,
        )


class EnergonTrainLoader(TrainLoader):
    """The base's loader over Energon. What a worker reads depends on the number of ranks and of workers.

    An epoch has `rows_of_an_epoch` rows, but Energon shuffles across its end: a sample may wait there for
    `shuffle_buffer_size` others of its worker.
    """

    def __init__(
        self, dataset, workers: WorkerConfig, encoder, settings: dict, rows_of_an_epoch: int | None
    ) -> None:
        self._rows_of_an_epoch = rows_of_an_epoch
        guard_readers(dataset)
        self._loader = _isolate_rng_and_gc(
            get_savable_loader(
                dataset,
                checkpoint_every_sec=CHECKPOINT_SECONDS,
                watchdog_initial_timeout_seconds=FIRST_BATCH_SECONDS,
            )
        )
        if workers.num_workers > 0:
            self._loader.dataset.get_checkpoint = partial(checkpoint_of_worker, self._loader.dataset)
            raise_on_dead_worker(self._loader)
        source = energon_fingerprint(self._loader.config(), workers)
        super().__init__(encoder.drops, source | encoder_settings(encoder) | settings)

    def _make_batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state_dict(self) -> dict:
        return self._state(energon=to_json_data(self._loader.save_state_rank()))

    def load_state_dict(self, state: dict) -> None:
        self._check(state)
        saved = from_json_data(state["energon"])
        self._loader.restore_state_rank(saved)
        if saved is not None and self._loader.num_workers > 0:
            # Energon 7.4.1 forgets the offset into a worker's checkpoint here: a state saved before every
            # worker has yielded would repeat samples.
            self._loader._worker_sample_counters = [
                (0 if worker.state is None else worker.state.sample_index) - 1 + worker.offset
                for worker in saved.worker_states
            ]

    def load_states(self, states: list[dict]) -> None:
        self.load_state_dict(states[min(self.fingerprint["rank"], len(states) - 1)])

    def rows_in(self, epochs: int) -> int | None:
        return self._rows_of_an_epoch and epochs * self._rows_of_an_epoch

    def replay(self, restore_key: Any) -> Batch:
        _, *place = as_restored(restore_key)  # its first part says whether there were workers
        return self._loader.restore_sample([type(self._loader.dataset).__name__, *place])


class EnergonValidLoader(ValidLoader):
    """The base's loader over Energon; a share is the worker configuration that reads it."""

    def __init__(
        self,
        data: DataConfig,
        read: list[DataSource],
        workers: WorkerConfig,
        encoder,
        micro_batch_size: int,
    ) -> None:
        self._data = data
        self.name = _name(read)
        self._read, self._encoder, self._micro_batch_size = read, encoder, micro_batch_size
        self.sources = path_names(read) if len(read) > 1 else []
        self._rank_share, self._full_share = workers, _with_ranks_as_workers(workers, 0)
        super().__init__(encoder.drops, self._most_batches_of_a_rank())

    def _select_source(self, source: str) -> None:
        self._read = [self._read[self.sources.index(source)]]

    def _open(self) -> DataLoader:
        dataset = self._dataset(self._rank_share)
        loader = _isolate_rng_and_gc(
            get_loader(dataset, watchdog_initial_timeout_seconds=FIRST_BATCH_SECONDS)
        )
        loader.dataset.datasets = (_with_rest(loader.dataset.dataset, self._encoder),)
        return loader

    def _dataset(self, workers: WorkerConfig):
        source = checked_source(self._read, "val")
        with reading_sources(self._read), read_as_data(self._data):
            dataset = get_val_dataset(
                source,
                split_part="val",
                worker_config=workers,
                batch_size=self._micro_batch_size,
                task_encoder=self._encoder,
            )
        guard_readers(dataset)
        return dataset

    def _most_batches_of_a_rank(self) -> int:
        """The most batches that any rank has: Energon cuts data for one rank with all workers alike."""
        per_rank, world_size = max(1, self._rank_share.num_workers), self._rank_share.world_size
        dataset = self._dataset(_with_ranks_as_workers(self._rank_share, per_rank * world_size))
        lengths = [dataset.len_worker(worker) for worker in range(per_rank * world_size)]
        return max(sum(lengths[rank * per_rank :][:per_rank]) for rank in range(world_size))


class EnergonSamples:
    """The samples of splits by number, each once, in stored order, with their keys in training."""

    def __init__(self, data: DataConfig, read: list[DataSource], encoder, split: str = "val") -> None:
        self._data = data
        self.name = _name(read, split)
        self.encoder = encoder
        self._read, self._split = read, split
        self._parts = functools.lru_cache(1)(self._opened)
        factories, _, firsts, lasts = zip(*self._parts(os.getpid()), strict=True)
        self._ends = np.cumsum(np.subtract(lasts, firsts))
        alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
        self.fingerprint = digest(energon_fingerprint([factory.config() for factory in factories], alone))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, index: int) -> ChatMLSample:
        """The sample before it is encoded; its `problem` says what is wrong with it."""
        return cook_record(self._load(index))

    def record(self, index: int) -> tuple[dict, None]:
        """The record of a sample, with its media in it, so that no folder holds them. Raises BadSample."""
        return record_of_parts(self._load(index)), None

    def _load(self, index: int) -> dict:
        number = int(np.searchsorted(self._ends, index, side="right"))
        factory, reader, _, last = self._parts(os.getpid())[number]
        stored = reader[last - (int(self._ends[number]) - index)]
        if stored is None:
            raise BadSample("bad_conversation", "split.yaml excludes it")
        return factory.load_sample(stored)

    def _opened(self, process: int) -> list[tuple[Any, Any, int, int]]:
        """(Energon's dataset, its reader, the first sample, the one after the last). Each forked process
        opens its own: processes share the place in an open file."""
        settings = {"training": False, "split_part": self._split, "decoder": self.encoder.decoder}
        alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
        source = checked_source(self._read, self._split)
        with reading_sources(self._read), read_as_data(self._data):
            loaded = load_dataset(source).get_datasets(worker_config=alone, **settings)
        parts = []
        for factory in [loaded_dataset.dataset for loaded_dataset in loaded.datasets]:
            dataset = factory.build()
            guard_readers(dataset)
            [inner] = [inner for inner in walk(dataset) if hasattr(inner, "join_readers")]
            offsets = inner.workers_slice_offsets[0]
            parts.append((factory, inner.join_readers[0], offsets[0], offsets[-1]))
        return parts


def _name(sources: list[DataSource], split: str = "val") -> str:
    return f"data: the {split!r} split of {', '.join(source.path for source in sources)}"


def _samples_of_an_epoch(open_dataset: Callable, workers: WorkerConfig, path: str) -> tuple[int, int | None]:
    """The most samples of a worker in an epoch, and the samples of all workers of all ranks.

    The latter is None if several parts of the data repeat on their own. Raises ValueError if a worker has no
    sample of a part.
    """
    count = max(1, workers.num_workers)
    numbers = range(count * workers.world_size)
    dataset = open_dataset(worker_config=_with_ranks_as_workers(workers, len(numbers)))
    parts = [part for part in walk(dataset) if isinstance(part, RepeatDataset)]
    lengths = [[part.dataset.len_worker(number) for part in parts] for number in numbers]
    if not all(map(all, lengths)):
        raise ValueError(
            f"data: {path} has a training set of fewer samples than {workers.world_size} ranks x {count} "
            "workers; lower data.num_workers or use fewer ranks."
        )
    endless = [index for index, part in enumerate(parts) if part.repeats is None]
    samples = sum(length[endless[0]] for length in lengths) if len(endless) == 1 else None
    return max(map(sum, lengths)), samples


def _with_rest(batches: Iterable[Batch], encoder: Any) -> Iterator[Batch | dict]:
    """The batches of a pass as a worker makes them, and then what was dropped since the last."""
    encoder.pop_drop_counts()  # of a pass that was left before its end, in this same process
    yield from batches
    yield {DROPPED: encoder.pop_drop_counts()}


def _raise_with_key(error: Exception, sample: Any, sources: Any = None) -> None:
    """Energon's error handler: only SkipSample drops a sample, everything else is a bug and ends the run."""
    if isinstance(error, TooManyDrops):
        raise error
    samples = sample if isinstance(sample, list) else [sample]
    keys = [s.get("__key__") if isinstance(s, dict) else getattr(s, "__key__", None) for s in samples]
    raise_naming_samples(error, keys)


def _with_ranks_as_workers(workers: WorkerConfig, num_workers: int) -> WorkerConfig:
    """One rank that reads everything; only the total number of workers decides how Energon cuts the data."""
    alone = copy.copy(workers)
    alone.rank = 0
    alone.world_size = 1
    alone.num_workers = num_workers
    return alone


def _isolate_rng_and_gc(loader):
    """The loader, which no longer draws from the run's random numbers or warns that it cannot pin memory.

    Its workers never collect what was the parent's: Energon would end their `gc.freeze`.
    """
    loader.dataset.dataset.freeze = loader.num_workers == 0
    loader.generator = torch.Generator()
    loader.pin_memory = loader.pin_memory and torch.cuda.is_available()
    return through_arenas(loader)
