"""Ends the run if a dataset drops too much, also if it gives no batch at all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

from megatron_vlm.config import DataConfig
from megatron_vlm.data.drops import MIN_SAMPLES, DropReport

PATIENCE = 30  # see `LimitedDrops.set_share`


class LimitedDrops:
    """A DropReport that ends the run from inside a worker. Without it, a worker would read a dataset without
    end, and without a batch, if every sample is dropped."""

    def __init__(self, report: DropReport, max_share: float) -> None:
        self._report, self._max_share = report, max_share
        self.epoch: int | None = None  # samples in an epoch of all ranks; None if epochs are not exact
        self._most_in_a_row: int | None = None  # as many drops of one process end the run, see `set_share`
        self._in_a_row: Counter[str] = Counter()  # drops in a row, by stage
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
        """For workers that each read their own share, of at most `samples`, and draw at random from `held` in
        their buffers: a sample waits for PATIENCE · held others with a chance of e^-PATIENCE."""
        if samples:
            self._most_in_a_row = max(MIN_SAMPLES, samples + PATIENCE * min(samples, held))

    def check(self) -> None:
        """Raises TooManyDrops."""
        self._report.check(self._max_share, epoch=self.epoch)

    def watch_epochs(self, place: Sequence[int]) -> EpochWatch:
        return EpochWatch(self._report, place)


class EpochWatch:
    """Raises TooManyDrops when a whole epoch of this rank had nothing to train on and at least MIN_SAMPLES
    were dropped. Otherwise the rank would read on without a batch, and all others would wait without end.

    `place` is where the reading begins: an epoch, and how much of it is done.
    """

    def __init__(self, report: DropReport, place: Sequence[int]) -> None:
        self._report = report
        self._epoch, begins = place[0], not any(place[1:])
        self._ends = int(begins)  # epoch ends since the last sample; the beginning of the first epoch counts
        self._kept, self._dropped_before = False, report.counted()[1]

    def see(self, place: Sequence[int], kept: bool) -> None:
        """Notes that the reading has reached `place`, and whether a sample was `kept` since the last call."""
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
    """A copy of `encoder` that counts in the same report and itself raises TooManyDrops."""
    limited = copy.copy(encoder)
    limited.drops = LimitedDrops(encoder.drops, data.max_drop_share)
    return limited
