"""A run's data on every rank: one rank of each model-parallel group reads, and the others receive.

While a step is trained, a thread on every rank reads the micro batches of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import record_function

from megatron_vlm.batch import Batch
from megatron_vlm.config import RunConfig, derived
from megatron_vlm.data.run_data import RunData
from megatron_vlm.job import watchdog
from megatron_vlm.job.failures import closing
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.broadcast import BatchBroadcaster
from megatron_vlm.parallel.counts import add_counts
from megatron_vlm.run_folder.batch_log import BatchLog, naming_samples
from megatron_vlm.training.checkpoint import CheckpointState


class Feed:
    """The micro batches of a run. Every rank creates one, and all ranks call its methods together.

    Training data goes on where `resumed` was saved, unless the configuration says that it begins again.
    """

    def __init__(self, config: RunConfig, source: Source, resumed: CheckpointState | None):
        self._run_dir, self._train = config.run_dir, config.train
        # without workers, encoding would disturb the process's generators in the middle of a step
        self._reader = ThreadPool(1, _begin_to_read, [setup.device()]) if config.data.num_workers else None
        self._coming: Callable[[], list[Batch]] | None = None  # the next step's micro batches
        self._dropped: int | None = None
        self._count = derived(config, dist.get_world_size())["micro_batches_per_step"]
        self._broadcaster = BatchBroadcaster()
        self._data: RunData | None = None  # None on a rank that only receives
        self._batches: Iterator[Batch] | None = None
        if self._broadcaster.reads:
            self._started(partial(self._open, config, source, resumed))()

    def _open(self, config: RunConfig, source: Source, resumed: CheckpointState | None) -> None:
        place = setup.data_parallel_place()
        self._data = RunData(config, source.processor, source.needs, *place)
        watchdog.also(self._data.drops.glance)
        if resumed and not config.data.restart:
            self._data.train_loader.load_states(resumed.loader_states)
        self._log = BatchLog(config.run_dir, *place, resumed.step + 1 if resumed else 1)
        self._batches = self._data.train_batches()

    @property
    def why_hf_processor(self) -> str | None:
        """Why this rank's samples go through the HF processor, which is slower; None if they do not."""
        return self._data and self._data.why_hf_processor

    @record_function("data")
    def train(self, step: int) -> list[Batch]:
        """The micro batches of a step. Raises ReadFailed on every rank if any rank could not read."""
        take = partial(self._broadcaster.take, self._batches, self._count, self._data and self._data.drops)
        coming = self._coming or self._started(take)
        micro_batches, self._coming = coming(), None
        if self._data:
            self._dropped = self._data.dropped_everywhere
            self._log.write(step, micro_batches)
        if self._reader is not None and not self._pauses_after(step):
            self._coming = self._started(take)
        return micro_batches

    def _started(self, do: Callable[[], Any]) -> Callable[[], Any]:
        """What waits for the result of `do`. All reading is the reader's: there the death of a data worker is
        an error like others; torch would let it interrupt the main thread, in the middle of a step."""
        return do if self._reader is None else self._reader.apply_async(do).get

    def _pauses_after(self, step: int) -> bool:
        """Whether the loader's state or the validation split is read before the next step."""
        return self._train.saves_after(step) or self._train.evaluates_after(step)

    def naming_samples(self, step: int, micro_batches: list[Batch]) -> AbstractContextManager[None]:
        """Makes errors from inside also say which samples the step had."""
        return naming_samples(self._run_dir, step, micro_batches)

    def valid(self) -> Callable[[int], list[Batch]]:
        """One pass over the validation split: a function (count) -> the next batches, fewer at the end."""
        batches = self._data and self._data.valid_batches()
        return lambda count: self._started(partial(self._broadcaster.take, batches, count))()

    def state(self) -> Any:
        """The loader state of a reading rank, for a checkpoint; None on the others."""
        return self._data and self._data.train_loader.state_dict()

    def dropped_everywhere(self) -> int | None:
        """Samples dropped by all ranks, as of the last step; None on a rank that does not read."""
        return self._dropped

    def dropped_by_reason(self) -> dict[str, int]:
        """The drops of all ranks by reason."""
        return add_counts(self._data.dropped if self._data else {})

    def close(self) -> None:
        """End the data workers at once."""
        if self._reader is not None:
            self._reader.close()
        if self._data:
            with closing(self._log, self._data):
                pass


def _begin_to_read(device: torch.device) -> None:
    watchdog.reader()
    if device.type == "cuda":  # each thread has its own
        torch.cuda.set_device(device)
