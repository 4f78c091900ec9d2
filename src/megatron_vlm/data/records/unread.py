"""Columns that look like images or videos and are not read, because they have another name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.paths import FILMS, PICTURES
from megatron_vlm.data.records.blends import Blend, Table
from megatron_vlm.data.records.columns import IMAGES, VIDEOS
from megatron_vlm.data.records.parts import MEDIA, media_of_parts
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import printable

LOOKED_AT = 20  # records of each source


def unread_media(table: Table | StreamedRows) -> Iterator[str]:
    """What a user should know of each source whose first records have no media, but something like it; of
    a stream nothing, as reading it would take its records."""
    if isinstance(table, StreamedRows):
        return
    for part in table.tables.values() if isinstance(table, Blend) else [table]:
        if isinstance(part, Blend):
            yield from unread_media(part)
            continue
        records = list(_first_records(part))
        if any(record.get(name) for record in records for name in (*IMAGES, *VIDEOS)):
            continue
        if any(map(_names_media, records)):
            continue
        for ours, ends in (("images", PICTURES), ("videos", FILMS)):
            found = (key for record in records for key, value in record.items() if _is(value, ends))
            for theirs in dict.fromkeys(found):
                yield (
                    f"data: {printable(part.origin(0)[0])}: its first records have no images or videos, and "
                    f"{printable(theirs)}, which looks like them, is not read; data.columns.{ours}="
                    f"{printable(theirs)} reads it"
                )


def _names_media(record: dict) -> bool:
    """Whether parts of turns name media, be it in a way that is none."""
    try:
        return any(True for kind in MEDIA for _ in media_of_parts(record, kind))
    except BadSample:
        return True


def _first_records(table: Table) -> Iterator[dict]:
    for index in range(min(LOOKED_AT, len(table))):
        with suppress(BadSample):
            yield table.record(index)[0]


def _is(value: Any, ends: tuple[str, ...]) -> bool:
    """Whether a value looks like a medium of a kind, or several; bytes are taken for images."""
    if isinstance(value, list):
        return bool(value) and all(_is(item, ends) for item in value)
    if isinstance(value, dict):  # an image of `datasets`
        return isinstance(value.get("bytes"), bytes) and ends == PICTURES
    return isinstance(value, str) and value.lower().endswith(ends)
