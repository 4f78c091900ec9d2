"""Rows of a table or a stream, encoded by the encoder that Energon uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.energon import SkipSample
from torch.utils.data import Dataset

from megatron_vlm.batch import Batch
from megatron_vlm.data.chatml import BadSample, ChatMLSample
from megatron_vlm.data.drops import TooManyDrops
from megatron_vlm.data.encode.document import HFEncoderTaskSample
from megatron_vlm.data.ledger import LostSample, lost
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.records import conversation_json, conversation_of, images_of, videos_of
from megatron_vlm.data.records.streams import StreamedRows


class EncodedRows(Dataset):
    """(place, rows) → (place, their documents as one encoded sample or None, which of the rows were dropped).

    A row is its number in the table, or what the stream gave.
    """

    def __init__(self, table: Table | StreamedRows, encoder) -> None:
        self.table, self.encoder = table, encoder

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: tuple[Any, list]) -> tuple[Any, Any, list[int]]:
        place, indices = item
        encoded = [self._kept(self.encoder.encode_document, index) for index in indices]
        dropped = [number for number, sample in enumerate(encoded) if sample is None]
        if len(dropped) == len(indices):
            return place, None, dropped
        row = self.encoder.join([sample for sample in encoded if sample is not None])
        row.__restore_key__ = indices
        return place, row, dropped

    def measured(self, index: int) -> tuple[int, int] | None:
        """(tokens, patches) of a row's encoding, None when it is dropped."""
        found = self._kept(self.encoder.measure, index)
        return found and (found.length, found.patches)

    def _kept(self, encode: Callable[[ChatMLSample], Any], index: int) -> Any:
        try:
            return encode(self.sample(index))
        except SkipSample as skipped:
            if self.encoder.drops.latest != (key := self.table.key(index)):
                raise lost([key], "skipped without being counted as dropped") from skipped
            return None
        except (TooManyDrops, LostSample):
            raise
        except Exception as error:
            raise RuntimeError(
                f"data: sample {self.table.key(index)}: {type(error).__name__}: {error}"
            ) from error

    def sample(self, index: int) -> ChatMLSample:
        """The row as Energon's cooker would give it; `problem` tells the encoder what is wrong with it."""
        try:
            record, root = self.table.record(index)
            fields = {
                "conversation": conversation_json(conversation_of(record)).decode(),
                "imgs": images_of(record, root) or None,
                "videos": videos_of(record, root) or None,
            }
        except BadSample as bad:
            source, number = self.table.origin(index)
            problem = BadSample(bad.reason, f"{source}, record {number}: {bad.detail}")
            fields = {"conversation": "", "problem": problem}
        return ChatMLSample(__key__=self.table.key(index), __restore_key__=(), **fields)

    def batch(self, samples: list[HFEncoderTaskSample]) -> Batch:
        return self.encoder.encode_batch(self.encoder.batch(samples))

    @functools.cached_property
    def fingerprint(self) -> str:
        return self.table.fingerprint()
