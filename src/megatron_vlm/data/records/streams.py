"""A source that comes as a stream of records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.conversation.chatml import BadSample
from megatron_vlm.data.records.columns import Columns
from megatron_vlm.data.records.normalise import normalise

Row = tuple[tuple[int, int], dict]  # shard and number in it; the record as the stream gave it


@dataclass
class StreamedRows:
    """The facts about a stream that are known without reading it; reads its records."""

    name: str
    stream: Any  # datasets.IterableDataset
    root: Path
    columns: Columns

    @classmethod
    def open(cls, path: str, columns: Columns, media_dir: str | None = None) -> StreamedRows:
        """The opened stream. Raises ValueError if the source cannot be streamed or lacks a mapped column."""
        from megatron_vlm.data.records.hub import is_saved_folder, media_root, open_stream
        from megatron_vlm.data.records.tables import kind_of

        if kind_of(path) != "hf" or is_saved_folder(Path(path)):
            raise ValueError(f"data.streaming: {path} is read where it lies; drop data.streaming.")
        stream = open_stream(path)
        if stream.features is not None:
            columns.check(list(stream.features), path)
        return cls(path, stream, Path(media_dir) if media_dir else media_root(path), columns)

    def key(self, row: Row) -> str:
        shard, number = row[0]
        return f"{shard:05d}-{number:09d}"

    def place(self, row: Row) -> tuple[int, int]:
        return row[0]

    def at(self, places: Sequence[tuple[int, int]]) -> list[Row]:
        """The rows at these places. Each of their shards is read from its beginning to the last of them."""
        found, wanted = {}, {tuple(place) for place in places}
        for shard in {shard for shard, _ in wanted}:
            end = max(number for of, number in wanted if of == shard) + 1
            records = itertools.islice(self.stream.shard(self.stream.num_shards, shard), end)
            found |= {(shard, n): record for n, record in enumerate(records) if (shard, n) in wanted}
        if missing := sorted(wanted - found.keys()):
            raise ValueError(f"data: {self.name} has no more the rows (shard, number) {missing}; it changed.")
        return [(tuple(place), found[tuple(place)]) for place in places]

    def sizes(self, row: Row) -> None:
        """The same as of a table; a stream's images have their own sizes."""

    def origin(self, row: Row) -> tuple[str, str]:
        return self.name, self.key(row)

    def record(self, row: Row) -> tuple[dict, Path]:
        return self.columns.of_arrow(row[1]), self.root

    def fingerprint(self) -> str:
        """Identifies the stream by its columns, its number of shards and its first record.

        Raises ValueError if the stream has no rows or cannot be read.
        """
        from megatron_vlm.data.records.hub import naming_the_damaged

        with naming_the_damaged(self.name):
            first = next(iter(self.stream), None)
        if first is None:
            raise ValueError(f"data: {self.name} has no rows.")
        try:
            conversation, _ = normalise(self.columns.of_arrow(first))
        except BadSample as bad:
            conversation = bad.reason
        return (
            f"stream of {self.stream.num_shards} shards, {digest([str(self.stream.features), conversation])}"
        )
