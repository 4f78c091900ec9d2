"""The base classes of the Energon and the Hugging Face loaders.

Validation has equal length on every rank; a fingerprint holds the settings of encoder and processor.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.batch import DROPPED, Batch, fully_masked
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import DropReport, TooManyDrops
from megatron_vlm.data.accounts.fingerprint import check_fingerprint
from megatron_vlm.data.load.energon_state import FORMAT
from megatron_vlm.data.load.workers import close_loader, through_arenas, worker_death, workers_of
from megatron_vlm.data.on_disk.paths import sources_of
from megatron_vlm.job.errors import without_traceback
from megatron_vlm.messages import PrintableText, join_lines


def order_settings(data: DataConfig, micro_batch_size: int, seed: int) -> dict:
    """The settings of a loader's fingerprint that decide the order of samples, whatever their source."""
    shares = [source.rows or source.share for source in sources_of(data.train_data_path)]
    return {
        "micro_batch_size": micro_batch_size,
        "seed": seed,
        "resize_jitter": data.resize_jitter or None,
        "box_question": None,  # a setting that older states name
        "packing": data.packing,
        "packing_buffer_size": data.packing_buffer_size if data.packing == "stream" else None,
        "repetitions": shares if any(shares) else None,
    }


def with_limited_drops(encoder, data: DataConfig):
    """A copy of `encoder` that counts in the same report and itself raises TooManyDrops."""
    limited = copy.copy(encoder)
    limited.drops = encoder.drops.with_max_share(data.max_drop_share)
    return limited


def loader_of(rows: Dataset, order: Iterable, num_workers: int, prefetch_factor: int = 2) -> DataLoader:
    """A loader whose workers look up each entry of an order in `rows`."""
    loader = DataLoader(
        rows,
        batch_size=None,
        sampler=order,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,  # keeps the iterator where `close_loader` finds it
        collate_fn=lambda item: item,
        generator=torch.Generator(),  # the run's own random numbers stay as they are
        multiprocessing_context="fork" if num_workers else None,
    )
    return through_arenas(loader)


def next_or_too_many_drops(batches: Iterator[Batch], drops: DropReport, loader: DataLoader) -> Batch | None:
    """The next batch, and its drops have arrived; None after the last. If a worker gave up or was killed, the
    error says why in short."""
    try:
        batch = next(batches, None)
    except (RuntimeError, EOFError, ConnectionError) as error:  # the last two: it died while sending a batch
        drops.check()
        if isinstance(error, TooManyDrops):  # a worker has made each of its lines printable
            raise TooManyDrops(PrintableText(without_traceback(str(error)))) from error
        if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
            raise RuntimeError(worker_death(workers_of(loader))) from error
        raise
    drops.check()
    drops.arrived.update(batch.pop(DROPPED, {}) if batch else {})
    return batch


class TrainLoader(ABC):
    """An endless iterator of batches; `state_dict` is the state after the last batch yielded.

    If it reads several sources, a sample's key is `SOURCE-KEY`, and `sources` are their names.
    """

    sources: Sequence[str] = ()
    notes: Sequence[str] = ()  # what a user should know of the data
    _loader: DataLoader

    def __init__(self, drops: DropReport, fingerprint: dict) -> None:
        self._drops, self.fingerprint = drops, fingerprint
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._make_batches()
        batches, self._batches = self._batches, iter(())  # stays empty after an error
        batch = next_or_too_many_drops(batches, self._drops, self._loader)
        if batch is None:
            raise RuntimeError("loader: an earlier error ended it; load the last saved state into a new one.")
        self._batches = batches
        return batch

    @abstractmethod
    def _make_batches(self) -> Iterator[Batch]: ...

    @abstractmethod
    def state_dict(self) -> dict:
        """The state as JSON data."""

    @abstractmethod
    def load_state_dict(self, state: dict) -> None:
        """Continue after the batch at which `state` was saved. Call it before the first batch.

        Raises ValueError that names the difference if the state is of another dataset, rank or setting.
        """

    @abstractmethod
    def load_states(self, states: list[dict]) -> None:
        """Continue where the ranks of a run stopped, given their states in order. Their number may change.

        Raises ValueError as `load_state_dict`, and for a source that needs the same number of ranks.
        """

    @abstractmethod
    def rows_in(self, epochs: int) -> int | None:
        """How many batch rows the first epochs have over all ranks together; a dropped sample counts, unless
        it was measured before. None if only reading tells, or if the data has no epochs."""

    @abstractmethod
    def replay(self, restore_key: Any) -> Batch:
        """The batch with this `__restore_key__`, of this dataset, in this or a later process.

        Any rank with any number of workers may have made it.
        """

    def close(self) -> None:
        """End the workers at once."""
        close_loader(self._loader)

    def _state(self, **content: Any) -> dict:
        return {"format": FORMAT, "fingerprint": self.fingerprint, **content}

    def _check(self, state: dict, **instead: Any) -> None:
        """Raises ValueError unless `state` fits this loader; `instead` replaces fields of its fingerprint."""
        if self._batches is not None:
            raise RuntimeError("loader: load_state_dict after the first batch; load it into a new loader.")
        if state.get("format") != FORMAT:
            raise ValueError(f"loader state: format {state.get('format')}, this version reads {FORMAT}.")
        check_fingerprint(state["fingerprint"] | instead, self.fingerprint)


class ValidLoader(ABC):
    """Iterates over the validation split. Each `for` is one pass, with its own workers, which end with it.

    A rank that runs short yields fully masked copies of its last batch (`loss_mask` all 0, no keys). So each
    rank yields `len(self)` batches and takes part in all collectives; the copies add nothing to a token mean.
    A rank without any batch of its own copies the first batch of the whole split.
    """

    sources: Sequence[str] = ()  # as those of `TrainLoader`
    name: str  # what is read, for messages
    _encoder: Any
    _num_workers: int
    _rank_share: Any  # this rank's share
    _full_share: Any  # the whole split
    _loader: DataLoader | None = None  # of the current pass

    def __init__(self, drops: DropReport, length: int) -> None:
        self._drops, self._length = drops, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        last, yielded = None, 0
        for last in self._checked():
            yield last
            yielded += 1
        assert yielded <= len(self), f"{yielded} batches where at most {len(self)} were expected"
        while yielded < len(self):
            last = fully_masked(last or self.first_batch())
            yield last
            yielded += 1

    def close(self) -> None:
        """End the workers of the current pass at once."""
        if self._loader is not None:
            close_loader(self._loader)

    @abstractmethod
    def _open(self) -> DataLoader: ...

    def _batches(self, loader: DataLoader) -> Iterator[Batch | dict]:  # and then what was dropped since
        return iter(loader)

    def _checked(self) -> Iterator[Batch]:
        loader = self._loader = self._open()
        try:
            batches = self._batches(loader)
            while (batch := next_or_too_many_drops(batches, self._drops, loader)) is not None:
                if "input_ids" in batch:
                    yield batch
        finally:
            close_loader(loader)

    @abstractmethod
    def _select_source(self, source: str) -> None:
        """Leaves all sources but one out of what is read."""

    def probe_sources(self) -> None:
        """Reads a batch of each source. Raises as `first_batch` for one that has no sample."""
        for source in self.sources or [""]:
            self.first_batch(source)

    def first_batch(self, source: str = "") -> Batch:
        """The first batch of the whole split, or of a source, read in this process; drops are not counted.

        Raises TooManyDrops, with all reasons, if there is no sample to validate on.
        """
        alone, report = copy.copy(self), DropReport()
        alone._encoder = copy.copy(self._encoder)
        alone._encoder.drops = alone._drops = report
        alone._rank_share, alone._num_workers = self._full_share, 0
        if source:
            alone._select_source(source)
        for batch in alone._checked():
            return batch
        name = f"{self.name}: source {source}" if source else self.name
        raise TooManyDrops(join_lines([f"{name} gives no sample to validate on:", *report.reason_lines()]))
