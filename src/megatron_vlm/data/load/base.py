"""What the Energon and the Hugging Face loaders share.

Validation has equal length on every rank; a fingerprint holds the settings of encoder and processor.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch.utils.data import DataLoader

from megatron_vlm.batch import Batch, fully_masked
from megatron_vlm.data.fingerprint import check_fingerprint
from megatron_vlm.data.load.energon_state import FORMAT
from megatron_vlm.data.load.limits import LimitedDrops
from megatron_vlm.job.failures import worker_death


class TrainLoader(ABC):
    """An endless iterator of batches; `state_dict` is the state after the last batch yielded.

    If it reads several sources, a sample's key is `SOURCE-KEY`, and `sources` are their names.
    """

    sources: Sequence[str] = ()
    words: Sequence[str] = ()  # what a user should know of the data

    def __init__(self, drops: LimitedDrops, fingerprint: dict) -> None:
        self._drops, self.fingerprint = drops, fingerprint
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._make_batches()
        batches, self._batches = self._batches, iter(())  # stays empty after an error
        batch = next_or_too_many_drops(batches, self._drops)
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

    @abstractmethod
    def close(self) -> None:
        """End the workers at once."""

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
    _mine: Any  # this rank's share, as `_open` takes it
    _all: Any  # the whole split, likewise
    _loader: DataLoader | None = None  # of the current pass

    def __init__(self, drops: LimitedDrops, length: int) -> None:
        self._drops, self._length = drops, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        last, yielded = None, 0
        for last in self._checked(self._mine):
            yield last
            yielded += 1
        assert yielded <= len(self), f"{yielded} batches where at most {len(self)} were expected"
        while yielded < len(self):
            last = fully_masked(last or self._first_batch())
            yield last
            yielded += 1

    def close(self) -> None:
        """End the workers of the current pass at once."""
        if self._loader is not None:
            close_loader(self._loader)

    @abstractmethod
    def _open(self, share: Any) -> DataLoader: ...

    @abstractmethod
    def _batches(self, loader: DataLoader) -> Iterator[Batch]: ...

    def _checked(self, share: Any) -> Iterator[Batch]:
        loader = self._loader = self._open(share)
        try:
            batches = self._batches(loader)
            while (batch := next_or_too_many_drops(batches, self._drops)) is not None:
                yield batch
        finally:
            close_loader(loader)

    def _first_batch(self) -> Batch:
        for batch in self._checked(self._all):
            return batch
        raise ValueError(f"data: {self.name} gives no sample; all were dropped.")


def next_or_too_many_drops(batches: Iterator[Batch], drops: LimitedDrops) -> Batch | None:
    """The next batch; None after the last. If a worker gave up or was killed, the error says why in short."""
    try:
        batch = next(batches, None)
    except (RuntimeError, EOFError, ConnectionError) as error:  # the last two: it died while sending a batch
        drops.check()
        if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
            raise RuntimeError(worker_death(error)) from error
        raise
    drops.check()
    return batch


def close_loader(loader: DataLoader) -> None:
    """End the workers at once; garbage collection would take 5 s for each worker of Energon.

    The threads that fed them have ended, too. A worker forked while such a thread closes its pipe would have
    a copy of the pipe, whose number may by then be that of the worker's own, and would close that.
    """
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        with contextlib.suppress(RuntimeError):  # torch reports a killed worker here, too
            iterator._shutdown_workers()
        for queue in getattr(iterator, "_index_queues", ()):
            if queue._thread is not None:
                queue._thread.join(timeout=5)
