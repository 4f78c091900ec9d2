"""Tells a user by a source's first records which media are not read, and which placeholders stay text."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from megatron_vlm.data.conversation.chatml import BadSample, cook_chatml_sample
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.on_disk.placeholders import foreign_placeholders, stand_for
from megatron_vlm.data.records.blends import Blend, Table
from megatron_vlm.data.records.normalise import normalise
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import printable

LOOKED_AT = 100  # records of each source, from its first to its last: another spelling may begin anywhere


def first_notes(table: Table | StreamedRows) -> Iterator[str]:
    """Lines about each source: media in columns that are not read, and placeholders of other models that stay
    text. There are none about a stream, as reading it would take its records."""
    if isinstance(table, StreamedRows):
        return
    for source in table.tables.values() if isinstance(table, Blend) else [table]:
        records, has_media, left = [], False, Counter()
        for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source)), dtype=int):
            with suppress(BadSample):
                record, _ = source.record(int(index))
                conversation, media = normalise(record)
                records.append(record)
                has_media = has_media or any(media.values())
                left.update(_left(conversation, media))
        lines = [] if has_media else [*_unread(records)]
        lines += [
            f"{count} of {len(records)} records looked at write {printable(spelling)} not once for each of "
            f"their {kind}s, so it stays text; write <{kind}> there instead"
            for (kind, spelling), count in left.items()
        ]
        for line in lines:
            yield f"data: {printable(source.origin(0)[0])}: {line}"


def _unread(records: list[dict]) -> Iterator[str]:
    """Columns that look like media."""
    items = [item for record in records for item in record.items()]
    for ours, ends in (("images", PICTURES), ("videos", FILMS)):
        for theirs in dict.fromkeys(printable(key) for key, value in items if _is(value, ends)):
            yield (
                f"its records have no images or videos, and {theirs}, which looks like them, is not "
                f"read; data.columns.{ours}={theirs} reads it"
            )


def _is(value: Any, ends: tuple[str, ...]) -> bool:
    """Whether a value looks like a medium of a kind, or several; bytes are taken for images."""
    if isinstance(value, list):
        return bool(value) and all(_is(item, ends) for item in value)
    if isinstance(value, dict):  # an image of `datasets`
        value = value.get("bytes")
    if isinstance(value, bytes):
        return ends == PICTURES
    return isinstance(value, str) and value.lower().endswith(ends)


def _left(conversation: dict, media: dict[str, list]) -> Iterator[tuple[str, str]]:
    """The kinds of media for which a record has placeholders that `place_media` leaves, and one of them."""
    messages, _ = cook_chatml_sample(conversation)
    kinds = {part["type"] for message in messages for part in message["content"]}
    for kind, items in media.items():
        foreign = foreign_placeholders(messages, kind) if items else []
        if foreign and (kind in kinds or not stand_for(foreign, len(items))):
            yield kind, foreign[0]
