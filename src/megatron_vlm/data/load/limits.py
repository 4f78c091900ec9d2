"""A dataset that drops too much ends the run, also where it gives no batch at all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

from megatron_vlm.config import DataConfig
from megatron_vlm.data.drops import MIN_SAMPLES, DropReport

PATIENCE = 30  # see `LimitedDrops.set_share`


class LimitedDrops:
    """A DropReport that ends the run from inside a worker, where a dataset of which every sample is dropped
    would otherwise be read without end and without a batch."""

    def __init__(self, report: DropReport, max_share: float) -> None:
        self._report, self._max_share = report, max_share
        self.epoch: int | None = None  # samples in an epoch of all ranks, where these come in exact epochs
        self._most_in_a_row: int | None = None  # dropped by one process that reads a share of its own
        self._in_a_row: Counter[str] = Counter()  # by stage
        self.keep = report.keep

    def drop(self, key: str, reason: str, detail: str = "", stage: str = "") -> None:
        self._report.drop(key, reason, detail)
        self._in_a_row[stage] += 1
        if self._most_in_a_row is not None and self._in_a_row[stage] >= self._most_in_a_row:
            self._report.epoch_was_dropped(self._in_a_row[stage])
        self.check()

    @property
    def latest(self) -> str | None:
        """The key that this process counted last."""
        return self._report.latest

    def passed(self, stage: str) -> None:
        """One more sample went through a stage of its encoding."""
        self._in_a_row[stage] = 0

    def set_share(self, samples: int, held: int) -> None:
        """For workers that each read a share of their own, of at most `samples`, and draw at random from
        `held` in their buffers: one waits for PATIENCE times as many others with a chance of e^-PATIENCE."""
        if samples:
            self._most_in_a_row = max(MIN_SAMPLES, samples + PATIENCE * min(samples, held))

    def check(self) -> None:
        """Raises TooManyDrops."""
        self._report.check(self._max_share, epoch=self.epoch)

    def watch_epochs(self, place: Sequence[int]) -> EpochWatch:
        return EpochWatch(self._report, place)


class EpochWatch:
    """Raises TooManyDrops when a whole epoch of this rank had nothing to train on, and at least MIN_SAMPLES
    were dropped: a rank that goes on without a batch, and all others that wait for it, would never end.

    `place`, where the reading begins, is an epoch and what of it is done.
    """

    def __init__(self, report: DropReport, place: Sequence[int]) -> None:
        self._report = report
        self._epoch, begins = place[0], not any(place[1:])
        self._ends = int(begins)  # ends of epochs since the last sample, the one before the beginning too
        self._kept, self._dropped_before = False, report.counted()[1]

    def see(self, place: Sequence[int], kept: bool) -> None:
        """The reading has come to `place`; `kept`: with a sample since it was last seen."""
        self._kept |= kept
        if place[0] == self._epoch:
            return
        if self._kept:
            self._ends, self._dropped_before = 0, self._report.counted()[1]
        else:
            self._ends += place[0] - self._epoch
        self._epoch, self._kept = place[0], False
        dropped = self._report.counted()[1] - self._dropped_before
        if self._ends > 1 and dropped >= MIN_SAMPLES:
            self._report.epoch_was_dropped(dropped)
            self._report.check(1.0)


def with_limited_drops(encoder, data: DataConfig):
    """A copy of `encoder` that counts in the same report and raises TooManyDrops by itself."""
    limited = copy.copy(encoder)
    limited.drops = LimitedDrops(encoder.drops, data.max_drop_share)
    return limited
