"""Rows of a table or a stream, encoded by the encoder that Energon uses."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.energon import SkipSample
from torch.utils.data import DataLoader, Dataset

from megatron_vlm.batch import DROPPED, Batch
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.accounts.drops import TooManyDrops
from megatron_vlm.data.accounts.ledger import lost
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.encode.document import HFEncoderTaskSample
from megatron_vlm.data.load.shared_memory import through_arenas
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.streams import StreamedRows


class EncodedRows(Dataset):
    """(place, rows) → (place, their documents as one encoded sample or None, {n: why the n-th was dropped}).

    A row is its number in the table, or what the stream gave.
    """

    def __init__(self, table: Table | StreamedRows, encoder) -> None:
        self.table, self.encoder = table, encoder

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: tuple[Any, list]) -> tuple[Any, Any, dict[int, str]]:
        place, indices = item
        encoded, places, dropped = [], [], {}
        for number, index in enumerate(indices):
            try:
                encoded.append(self._naming(self.encoder.encode_document, index))
                places.append(self.table.place(index))
            except SkipSample as skipped:
                if not isinstance(bad := skipped.__cause__, BadSample):  # the encoder counts it, and says so
                    raise lost(
                        [self.table.key(index)], "skipped without being counted as dropped"
                    ) from skipped
                dropped[number] = bad.reason
        if not encoded:
            return place, None, dropped
        row = self.encoder.join(encoded)
        row.__restore_key__ = places
        return place, row, dropped

    def measured(self, index: int) -> tuple[int, int] | None:
        """(tokens, patches) of a row's encoding, None for one that will be dropped, and then be counted."""
        try:
            document = self._naming(self.encoder.documents.measure, index)
        except BadSample:
            return None
        return document.length, document.patches

    def _naming(self, encode: Callable[[ChatMLSample], Any], index: int) -> Any:
        try:
            return encode(self.sample(index))
        except (BadSample, SkipSample, TooManyDrops):
            raise
        except Exception as error:
            raise RuntimeError(
                f"data: sample {self.table.key(index)}: {type(error).__name__}: {error}"
            ) from error

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

    def batches(self, settled: Iterable[tuple], size: int) -> Iterator[tuple[Any, Batch | dict]]:
        """(place, batch of `size`) from what a ledger settled; at last, samples and drops that are left."""
        samples, dropped = [], Counter()
        for place, sample, reasons in settled:
            dropped.update(reasons.values())
            samples += [] if sample is None else [sample]
            if len(samples) == size:
                yield place, self.batch(samples) | {DROPPED: dropped}
                samples, dropped = [], Counter()
        yield None, (self.batch(samples) if samples else {}) | {DROPPED: dropped}

    def batch(self, samples: list[HFEncoderTaskSample]) -> Batch:
        return self.encoder.encode_batch(self.encoder.batch(samples))

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.table.fingerprint()


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
