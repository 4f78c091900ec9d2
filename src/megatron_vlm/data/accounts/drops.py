"""Why samples cannot be trained on, and counts of encoded and dropped samples over all workers and ranks."""

import contextlib
import copy
import errno
import fcntl
import json
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from megatron_vlm.files import add_path_to_errors, open_to_write
from megatron_vlm.messages import join_lines, listed, mask_addresses


class BadSample(Exception):
    """This sample cannot be trained on; `reason` is a key of `drops.REASONS`, `detail` is for people."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


# What processors raise on images and videos that they cannot take: beside ValueErrors of their own, those of
# arithmetic with sizes that become 0, torch's, and one for a size that MiniCPM-V's sets only where it resizes
REFUSALS = (ArithmeticError, LookupError, NameError, RuntimeError, TypeError, ValueError)


def refused_by_processor(error: Exception) -> BadSample:
    """The BadSample that says what a processor raised on the media of a sample, one of REFUSALS."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return BadSample("processor_error", text)


# Every reason a sample can be dropped for, and what to do about it.
REASONS = {
    "bad_json": "the record is not JSON; repair it in its source, one record a line",
    "bad_conversation": "write turns of role and content; docs/how-to/prepare-data.md lists the formats",
    "bad_preference": "write one prompt with a chosen and a rejected answer, which differ "
    "(docs/how-to/prepare-data.md lists the formats); train.objective=tokens trains the chosen answers alone",
    "missing_media": "a file that the record names is not there or is none: download addresses; for "
    "dataset_type hf set data.media_dir to the folder that paths start from; for energon prepare the "
    "dataset again, with --image-root",
    "duplicate_key": "samples that follow one another in a shard have the same key, and Energon makes one of "
    "them; give each a key of its own, or prepare the dataset again",
    "unsafe_pickle": "a pickled part holds more than plain data; prepare the dataset again from its source",
    "placeholder_mismatch": "write one <image> or <video> per media item, or none at all",
    "bad_objects": "write boxes x1, y1, x2, y2 inside their images, and one placeholder for each; "
    "docs/how-to/boxes.md says which units and placeholders there are",
    "no_box_format": "the family publishes no way to write boxes: set data.box_format",
    "video_unsupported": "the model takes no videos; remove the samples with them",
    "images_and_videos": "the model takes one kind in a sample; divide the samples that hold both",
    "decode_timeout": "the files take longer to decode than data.decode_seconds: replace them or raise it",
    "video_clip": "correct video_start, video_end or nframes of these videos",
    "video_undecodable": "replace or remove the videos; mp4, mkv, webm, avi and lists of images are read",
    "video_truncated": "the files are cut short; copy them again",
    "video_too_large": "lower data.video_max_frames, set data.video_max_pixels, or shrink the videos",
    "image_undecodable": "replace or remove the images",
    "image_truncated": "the files are cut short; copy them again",
    "image_too_large": "shrink the images before preparing the dataset",
    "template_error": "the chat template refuses the conversation; its message says why",
    "processor_error": "the Hugging Face processor refuses the sample; its message says why",
    "model_refuses": "the model cannot take what the processor makes of the images or videos; its message "
    "says why: replace them, or put config.json and the processor of one model into the checkpoint's folder",
    "over_length": 'raise data.seq_length, lower data.max_pixels, or set data.over_length="truncate"',
    "over_patches": "raise data.max_patches, or lower data.max_pixels",
    "left_out": "your own function returned None for it; raise data.max_drop_share if that is meant",
    "no_trained_tokens": "the conversation has no assistant reply with content left to train on",
}


MIN_SAMPLES = 100  # of fewer samples, the dropped share says little
DETAILS = 100_000  # drops of a reason that are written with their detail
PATIENCE = 30  # see `DropReport.set_share`


class TooManyDrops(RuntimeError):
    """More samples were dropped than the run allows, a whole epoch was, or a drop cannot be written down."""


class DropReport:
    """Counts of encoded samples and of drops per reason, shared with worker processes forked later.

    Every drop is appended to `path` (None: a temporary file) as a JSON line with key and reason; the first
    DETAILS of each reason have their detail too. Samples that a resumed loader encodes again count again.
    `set_remote_counts` brings in the counts of the other `ranks`; all workers see them.

    A report with limits ends the run from inside a worker. Without them, a worker would read a dataset
    without end, and without a batch, if every sample is dropped.

    `arrived` are the drops on the way to the batches that this process took from its loaders. Unlike the
    other counts, they depend on the place in the data alone, not on what workers read ahead.
    """

    def __init__(self, path: str | Path | None = None, ranks: int = 1):
        numbers = np.frombuffer(mmap.mmap(-1, 8 * (len(REASONS) + 6)), np.int64)  # shared with forked workers
        self._counts, exchanged = np.split(numbers, [1 + len(REASONS)])
        # [encoded, dropped] elsewhere, then here at that time; [samples of an epoch that was all dropped]
        self._others, self._fruitless = np.split(exchanged, [4])
        self._lock = tempfile.TemporaryFile(buffering=0)
        self.hints: list[str] = []  # the last lines of messages: what may be why samples are dropped
        self._max_share = 1.0
        self.epoch: int | None = None  # samples in an epoch of all ranks; None if epochs are not exact
        self._most_in_a_row: int | None = None  # as many drops of one process end the run, see `set_share`
        self.arrived: Counter[str] = Counter()
        self._ranks, self._arrived_elsewhere = ranks, 0
        self._slots = {reason: slot for slot, reason in enumerate(REASONS, start=1)}
        self._place = Path(path or tempfile.gettempdir())
        if path is None:
            self._file = tempfile.TemporaryFile("a+b", buffering=0)
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_write(path, "a+b", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":  # a full disk cut the last line
            self._write(b"\n")
        self._start = os.fstat(self._file.fileno()).st_size

    def with_max_share(self, max_share: float) -> Self:
        """The same counts, with limits that this report does not get."""
        report = copy.copy(self)
        report._max_share = max_share
        return report

    def set_share(self, samples: int, buffered: int) -> None:
        """Sets limits: each worker reads a share of at most `samples` and draws at random from `held` in its
        buffers. A sample waits for PATIENCE · held others with a chance of e^-PATIENCE."""
        if samples:
            self._most_in_a_row = max(MIN_SAMPLES, samples + PATIENCE * min(samples, buffered))

    def keep(self) -> None:
        """One more sample was encoded."""
        with self._locked():
            self._counts[0] += 1

    def drop(
        self, key: str, reason: str, detail: str = "", in_a_row: int = 1, record_id: str | None = None
    ) -> None:
        """One more sample was dropped. `reason` is one of REASONS; `in_a_row`: so many drops of this process
        followed one another. Raises TooManyDrops."""
        slot = self._slots[reason]
        line = {"key": key, "id": record_id} if record_id else {"key": key}
        line["reason"] = reason
        if self._counts[slot] < DETAILS:
            line["detail"] = mask_addresses(detail)[:500]
        self._write(json.dumps(line).encode() + b"\n")  # before counting, so that every counted drop is named
        with self._locked():
            self._counts[slot] += 1
        if self._most_in_a_row is not None and in_a_row >= self._most_in_a_row:
            self.epoch_was_dropped(in_a_row)
        self.check()

    def _write(self, line: bytes) -> None:
        """Appends without a buffer, so that lines from several processes stay whole."""
        try:
            with add_path_to_errors(self._place):
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the report of dropped samples is cut short")
        except OSError as error:  # no sample is to blame
            raise TooManyDrops(join_lines([error])) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps all other processes out. The kernel frees the lock of a killed process; a stopped one delays
        the others."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def summary(self) -> dict:
        """`{"encoded": int, "dropped": int, "reasons": {reason: count}}`, only with reasons that occurred.

        It waits for no lock, so that a stopped worker cannot stop who looks whether the others go on.
        """
        encoded, *counts = self._counts.tolist()
        reasons = {reason: count for reason, count in zip(REASONS, counts, strict=True) if count}
        return {"encoded": encoded, "dropped": sum(counts), "reasons": reasons}

    def counted(self) -> list[int]:
        """[encoded, dropped] on this rank."""
        counts = self.summary()
        return [counts["encoded"], counts["dropped"]]

    def local_counts(self) -> list[int]:
        """[encoded, dropped, arrived] on this rank, for the others."""
        return [*self.counted(), self.arrived.total()]

    def set_remote_counts(self, counts: list[int]) -> None:
        """Takes [encoded, dropped, arrived] of all other ranks until now."""
        *counted, self._arrived_elsewhere = counts
        here_now = self.counted()
        with self._locked():
            self._others[:] = counted + here_now

    def total_arrived(self) -> int:
        """The drops that arrived on this rank until now, on the others until the last exchange."""
        return self.arrived.total() + self._arrived_elsewhere

    def on_all_ranks(self, patience: int) -> list[int]:
        """[encoded, dropped] over all ranks at the last exchange. If this rank has seen `patience` samples
        since, its own counts are of now: it may be dropping everything and never reach an exchange."""
        now = self.counted()
        with self._locked():
            *elsewhere, encoded, dropped = self._others.tolist()
        this_rank = [encoded, dropped] if sum(now) - encoded - dropped < patience else now
        return [sum(both) for both in zip(this_rank, elsewhere, strict=True)]

    def examples(self) -> list[dict]:
        """The drops that this report has written, each with `key`, `reason` and perhaps `detail`."""
        size = os.fstat(self._file.fileno()).st_size
        *lines, _ = os.pread(self._file.fileno(), size - self._start, self._start).split(b"\n")
        return [json.loads(line) for line in lines]  # without the line that a worker is writing just now

    def epoch_was_dropped(self, samples: int) -> None:
        """Notes that a whole epoch of this rank gave nothing to train on: its last `samples` samples were all
        dropped. From now on `check` raises, in every process."""
        self._fruitless[0] = samples

    def check(self) -> None:
        """Raises TooManyDrops when at least MIN_SAMPLES were seen and more than the `max_share` were dropped.
        An `epoch` with fewer samples is judged as a whole; a `max_share` of 0 raises at the first drop.

        The counts are of all ranks at the last exchange. This rank's own are of now when it has since
        seen MIN_SAMPLES for each rank.
        """
        if self._fruitless[0]:
            fact = (
                f"data: a whole epoch of this rank has nothing to train on: all of the last "
                f"{self._fruitless[0]} samples were dropped. Of this rank's samples until now, "
                f"{self.counted()[0]} were encoded and these dropped:"
            )
            raise TooManyDrops(join_lines([fact, *self.reason_lines()]))
        # A small dataset is judged by whole epochs, so that its first samples do not decide alone
        epoch = self.epoch if self.epoch and self.epoch < MIN_SAMPLES else None
        min_samples = (epoch or MIN_SAMPLES) if self._max_share else 1
        encoded, dropped = self.on_all_ranks(min_samples * self._ranks if self._ranks > 1 else 0)
        seen = encoded + dropped
        if seen < min_samples or dropped <= self._max_share * (-(-seen // epoch) * epoch if epoch else seen):
            return
        # The message says how many of them this rank knows, since it lists only its own
        reasons = self.summary()["reasons"]
        on_this_rank = f" ({sum(reasons.values())} of them here)" if sum(reasons.values()) < dropped else ""
        fact = (
            f"data: {dropped}{on_this_rank} of {seen} samples read so far, also ahead of training, were "
            f"dropped ({dropped / seen:.1%}), more than data.max_drop_share = {self._max_share:.1%}:"
        )
        raise TooManyDrops(join_lines([fact, *self.reason_lines()]))

    def reason_lines(self) -> list[str]:
        """A line for each reason: its count, what helps, three keys and what was wrong with the first."""
        reasons = self.summary()["reasons"]
        by_reason: dict[str, list[dict]] = {}
        for example in self.examples():
            by_reason.setdefault(example["reason"], []).append(example)
        return [
            f"  {count} {reason}: {REASONS[reason]}{_such_as(by_reason.get(reason, [])[:3])}"
            for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
        ] + self.hints


def _such_as(examples: list[dict]) -> str:
    if not examples:
        return ""
    keys = ", ".join(str(example["key"]) for example in examples)
    detail = examples[0].get("detail")
    return f" (such as {keys}" + (f"; the first: {detail})" if detail else ")")


# -- rows that were neither trained on nor counted as dropped end the run

REMEDY = "This is a bug: please report it; nothing is lost when you start again from the last checkpoint."


class LostSample(RuntimeError):
    """A row was neither trained on nor counted as dropped."""


def lost_samples(keys: Sequence[Any], happened: str) -> LostSample:
    """The error that says what `happened` to the rows with `keys`."""
    return LostSample(f"data: {listed([*map(str, keys)])}: {happened}. {REMEDY}")


def check_each_once(documents: ArrayLike, count: int, noun: str) -> None:
    """Raises LostSample unless `documents` are 0 … count - 1, in any order."""
    times = np.bincount(np.asarray(documents, int), minlength=count)
    if len(times) > count or (times != 1).any():
        raise lost_samples(np.flatnonzero(times != 1).tolist(), f"of {count} {noun}, not taken exactly once")
