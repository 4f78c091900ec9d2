"""Tells a user by a source's first records which media are not read, and which placeholders."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.placeholders import foreign_placeholders, spellings, stand_for
from megatron_vlm.data.chatml.record import Conversation, parse_record
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import listed

MOST_KEYS = 8  # that a line names
LOOKED_AT = 100  # records of each source; of a table from its first to its last: any may be spelled otherwise


@dataclass
class SourceSample:
    """The records of a source that were looked at, and their conversations."""

    name: str
    records: list[dict] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)


def sample_sources(table: Table | StreamedRows) -> list[SourceSample]:
    """Return records of each source, from its first to its last; of a stream the first ones."""
    if isinstance(table, StreamedRows):
        return [read_sample(table.name, table, table.first_rows(LOOKED_AT))]
    sources = (table.parts() or {"": table}).values()
    return [
        read_sample(
            source.origin(0)[0],
            source,
            np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source)), dtype=int).tolist(),
        )
        for source in sources
    ]


def read_sample(name: str, source: Any, rows: Iterable) -> SourceSample:
    """Return the rows that can be read of a source, which has `record(row)`."""
    sample = SourceSample(name)
    for row in rows:
        with suppress(BadSample):
            record, _ = source.record(row)
            sample.conversations.append(parse_record(record))
            sample.records.append(record)
    return sample


def first_notes(samples: list[SourceSample]) -> Iterator[str]:
    """Lines about each source: media in columns that are not read, placeholders in another form."""
    for sample in samples:
        notes, unread = Counter(), Counter()
        for conversation in sample.conversations:
            notes.update(dict.fromkeys(_placeholders(conversation), 1))
            unread.update(conversation.unread)
        has_media = any(any(conversation.media.values()) for conversation in sample.conversations)
        lines = list(_unread_keys(unread))
        lines += [] if has_media else _unread_media(sample.records)
        count = len(sample.records)
        lines += [f"{number} of {count} records looked at {note}" for note, number in notes.items()]
        for line in lines:
            yield f"data: {sample.name}: {line}"


def _unread_keys(unread: Counter[tuple[str, str]]) -> Iterator[str]:
    """Lines about the keys that nothing reads, one each for records, turns and parts."""
    for place in dict.fromkeys(place for place, _ in unread):
        names = sorted(name for where, name in unread if where == place)
        yield f"not read in a {place}: {listed(names, MOST_KEYS)}"


def _unread_media(records: list[dict]) -> Iterator[str]:
    """Columns that look like media."""
    items = [item for record in records for item in record.items()]
    for ours, ends in (("images", PICTURES), ("videos", FILMS)):
        for theirs in dict.fromkeys(key for key, value in items if _is(value, ends)):
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
    """Notes about a record's placeholders of other models, whether `place_media` reads them or not."""
    messages = conversation.messages
    kinds = {part["type"] for message in messages for part in message["content"]}
    for kind, items in conversation.media.items():
        are_read = kind not in kinds and stand_for(foreign_placeholders(messages, kind), len(items))
        for spelling in spellings(messages, kind) if items else ():
            remedy = f"is read as <{kind}>" if are_read else f"stays text; write <{kind}> there instead"
            yield f"write {spelling} beside their {kind}s, which {remedy}"
