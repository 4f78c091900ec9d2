"""Tells a user by a source's first records which media are not read, and which placeholders."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.placeholders import foreign_placeholders, spellings, stand_for
from megatron_vlm.data.chatml.record import Conversation, parse_record
from megatron_vlm.data.on_disk.coco import NOTES
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import listed, printable

MOST_KEYS = 8  # that a line names
LOOKED_AT = 100  # records of each source, from its first to its last: another spelling may begin anywhere


def first_notes(table: Table | StreamedRows) -> Iterator[str]:
    """Lines about each source: media in columns that are not read, placeholders in another form.
    There are none about a stream, as reading it would take its records."""
    if isinstance(table, StreamedRows):
        return
    for source in (table.parts() or {"": table}).values():
        records, has_media, notes, unread = [], False, Counter(), Counter()
        for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source)), dtype=int):
            with suppress(BadSample):
                record, _ = source.record(int(index))
                conversation = parse_record(record)
                records.append(record)
                has_media = has_media or any(conversation.media.values())
                found = (*_placeholders(conversation), *record.get(NOTES, ()))
                notes.update(dict.fromkeys(found, 1))
                unread.update(conversation.unread)
        lines = list(_unread_keys(unread))
        lines += [] if has_media else _unread_media(records)
        lines += [f"{count} of {len(records)} records looked at {note}" for note, count in notes.items()]
        for line in lines:
            yield f"data: {printable(source.origin(0)[0])}: {line}"


def _unread_keys(unread: Counter[tuple[str, str]]) -> Iterator[str]:
    """Lines about the keys that nothing reads, one each for records, turns and parts."""
    for place in dict.fromkeys(place for place, _ in unread):
        names = sorted(printable(name) for where, name in unread if where == place)
        yield f"not read in a {place}: {listed(names, MOST_KEYS)}"


def _unread_media(records: list[dict]) -> Iterator[str]:
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


def _placeholders(conversation: Conversation) -> Iterator[str]:
    """Notes about a record's placeholders of other models: those that `place_media` reads, and others."""
    messages = conversation.messages
    kinds = {part["type"] for message in messages for part in message["content"]}
    for kind, items in conversation.media.items():
        are_read = kind not in kinds and stand_for(foreign_placeholders(messages, kind), len(items))
        for spelling in spellings(messages, kind) if items else ():
            remedy = f"is read as <{kind}>" if are_read else f"stays text; write <{kind}> there instead"
            yield f"write {printable(spelling)} beside their {kind}s, which {remedy}"
