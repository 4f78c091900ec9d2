"""Rows of a table or a stream, encoded in data workers by the encoder that Energon uses.

order (position, rows) ── worker: record → sample ──▶ EncodedEntry ── delivery check ──▶ micro batch
"""

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.energon import SkipSample
from torch.utils.data import Dataset

from megatron_vlm.batch import DROPPED, Batch
from megatron_vlm.data.accounts.drops import MIN_SAMPLES, BadSample, DropReport, TooManyDrops, lost_samples
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.encode.document import HFEncoderTaskSample
from megatron_vlm.data.load.workers import loader_of, raise_naming_samples
from megatron_vlm.data.records.blends import MapDataset
from megatron_vlm.data.records.streams import StreamedRows


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
        encoded, places, dropped = [], [], {}
        for number, index in enumerate(indices):
            try:
                encoded.append(self._encode_named(self.encoder.encode_document, index))
                places.append(self.table.place(index))
            except SkipSample as skipped:
                if not isinstance(bad := skipped.__cause__, BadSample):  # the encoder counts it, and says so
                    raise lost_samples(
                        [self.table.key(index)], "skipped without being counted as dropped"
                    ) from skipped
                dropped[number] = bad.reason
        if not encoded:
            return EncodedEntry(position, None, dropped)
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
        keys = {"__key__": self.table.key(index), "__restore_key__": (), "sizes": self.table.sizes(index)}
        try:
            record, root = self.table.record(index)
            conversation = parse_record(record)
            images, videos = load_media(conversation, root)
            return make_sample(conversation, images, videos, **keys)
        except BadSample as bad:
            source, number = self.table.origin(index)
            problem = BadSample(bad.reason, f"{source}, record {number}: {bad.detail}")
        return ChatMLSample(problem=problem, **keys)

    def batch(self, samples: list[HFEncoderTaskSample]) -> Batch:
        return self.encoder.encode_batch(self.encoder.batch(samples))

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
                yield entry.position, self._rows.batch(samples) | {DROPPED: dropped}
                samples = []
                dropped = Counter()
        last_batch = self._rows.batch(samples) if samples else {}
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
