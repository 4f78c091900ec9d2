"""A source that comes as a stream of records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm import stores
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.accounts.fingerprint import digest
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.on_disk.descriptions import reading_data
from megatron_vlm.data.on_disk.rows_file import on_disk

Place = tuple[int, int, int]  # shard, number in it, and the epoch
Row = tuple[Place, dict]  # and the record as the stream gave it


@dataclass
class StreamedRows:
    """The facts about a stream that are known without reading it; reads its records.

    Its images have `sizes_in_turn` sizes, a new one each epoch, or 0: their own. `seed` decides which.
    """

    name: str
    stream: Any  # datasets.IterableDataset
    root: Path | str
    columns: Columns
    sizes_in_turn: int = 0
    seed: int = 0

    @classmethod
    def open(cls, path: str, columns: Columns, media_dir: str | None = None) -> StreamedRows:
        """The opened stream. Raises ValueError if the source cannot be streamed or lacks a mapped column."""
        from megatron_vlm.data.records.hub import is_saved_folder, media_root, open_stream
        from megatron_vlm.data.records.opening import kind_of

        if kind_of(path) != "hf" or is_saved_folder(Path(path)):
            raise ValueError(f"data.streaming: {path} is read where it lies; drop data.streaming.")
        stream = open_stream(on_disk(path))
        if stream.features is not None:
            columns.check(list(stream.features), path)
        return cls(path, stream, stores.folder(media_dir) if media_dir else media_root(path), columns)

    def key(self, row: Row) -> str:
        shard, number, _ = row[0]
        return f"{shard:05d}-{number:09d}"

    def sample_keys(self, row: Row) -> dict[str, Any]:
        """Return the fields of `MapDataset.sample_keys`."""
        return {"__key__": self.key(row), "__restore_key__": row[0], "sizes": self.sizes(row)}

    def records(self, shard: int) -> Iterator[dict]:
        """The records of a shard, as stored. Raises ValueError that names the file that cannot be read."""
        with reading_data(self.name):
            yield from self.stream.shard(self.stream.num_shards, shard)

    def first_rows(self, count: int) -> list[Row]:
        """The first rows of the first shard that has any, of a pass of their own over it."""
        for shard in range(self.stream.num_shards):
            records = itertools.islice(self.records(shard), count)
            if rows := [((shard, number, 0), record) for number, record in enumerate(records)]:
                return rows
        return []

    def at(self, places: Sequence[Place]) -> list[Row]:
        """The rows at these places. Each of their shards is read from its beginning to the last of them."""
        records_at, positions = {}, {(shard, number) for shard, number, _ in places}
        for shard in {shard for shard, _ in positions}:
            end = max(number for of, number in positions if of == shard) + 1
            records = itertools.islice(self.records(shard), end)
            records_at |= {(shard, n): record for n, record in enumerate(records) if (shard, n) in positions}
        if missing := sorted(positions - records_at.keys()):
            raise ValueError(f"data: {self.name} has no more the rows (shard, number) {missing}; it changed.")
        return [((shard, number, epoch), records_at[shard, number]) for shard, number, epoch in places]

    def sizes(self, row: Row) -> str | None:
        """The same as of a table."""
        if not self.sizes_in_turn:
            return None
        *_, epoch = row[0]
        return f"{self.seed} {epoch % self.sizes_in_turn} {self.key(row)}"

    def origin(self, row: Row) -> tuple[str, str]:
        return self.name, self.key(row)

    def record(self, row: Row) -> tuple[dict, Path | str]:
        return self.columns.of_arrow(row[1]), self.root

    def fingerprint(self) -> str:
        """Identifies the stream by its columns, its number of shards and its first record.

        Raises ValueError if the stream has no rows or cannot be read.
        """
        if not (rows := self.first_rows(1)):
            raise ValueError(f"data: {self.name} has no rows.")
        try:
            conversation = parse_record(self.record(rows[0])[0]).stored()
        except BadSample as bad:
            conversation = bad.reason
        return (
            f"stream of {self.stream.num_shards} shards, {digest([str(self.stream.features), conversation])}"
        )
