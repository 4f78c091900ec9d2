"""Notes on a source's first records: keys that are not read, and what the chat template leaves out."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Conversation, parse_record
from megatron_vlm.data.chatml.sample import foreign_placeholders, place_media, spellings, stand_for
from megatron_vlm.data.encode.encoder import without_thinking
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.records.datasets import MapDataset
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import listed

MOST_KEYS = 8  # that a line names
ENDINGS = {"image": PICTURES, "video": FILMS}
BOXES = ("<bbox>", "<ref-object>")  # what `extras.grounding` fills from a record's objects
LOOKED_AT = 100  # records of each source; of a table from its first to its last: any may be spelled otherwise


@dataclass
class SourceSample:
    """The conversations of those records of a source that were looked at."""

    name: str
    conversations: list[Conversation] = field(default_factory=list)


def sample_sources(table: MapDataset | StreamedRows) -> list[SourceSample]:
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
    return sample


def first_notes(samples: list[SourceSample], takes_columns: bool = False) -> Iterator[str]:
    """Yield lines about each source: the keys that are not read, and placeholders in another form.

    `takes_columns`: all keys of a record are given to functions of rewards.
    """
    for sample in samples:
        placeholders: Counter[str] = Counter()
        for conversation in sample.conversations:
            placeholders.update(dict.fromkeys(_placeholders(conversation), 1))
        for note, number in placeholders.items():
            yield f"data: {sample.name}: {number} of {len(sample.conversations)} records looked at {note}"
        unread = {key for conversation in sample.conversations for key in conversation.unread}
        if takes_columns:
            unread = {(place, key) for place, key in unread if place != "record"}
        has_media = any(any(conversation.media.values()) for conversation in sample.conversations)
        for place in sorted({place for place, _ in unread}):
            names = sorted(key for where, key in unread if where == place)
            line = f"data: {sample.name}: not read in a {place}: {listed(names, MOST_KEYS)}"
            is_hint = place == "record" and not has_media
            yield line + "; data.columns.images=NAME reads images from one" * is_hint


def _placeholders(conversation: Conversation) -> Iterator[str]:
    """Notes about a record's placeholders of other models, whether `place_media` reads them or not."""
    messages = conversation.messages
    kinds = {part["type"] for message in messages for part in message["content"]}
    for kind, items in conversation.media.items():
        are_read = kind not in kinds and stand_for(foreign_placeholders(messages, kind), len(items))
        for spelling in spellings(messages, kind, ENDINGS[kind]) if not items else ():
            yield f"write {spelling} and list no {kind}s, which stays text; name the files under {kind}s"
        for spelling in spellings(messages, kind) if items else ():
            remedy = f"is read as <{kind}>" if are_read else f"stays text; write <{kind}> there instead"
            yield f"write {spelling} beside their {kind}s, which {remedy}"
    with suppress(BadSample):  # else the record is dropped
        placed = place_media(messages, *map(len, conversation.media.values()))
        texts = [part.get("text", "") for message in placed for part in message["content"]]
        for kind in (kind for kind, items in conversation.media.items() if items):
            if any(f"<{kind}>" in text for text in texts):
                yield f"have <{kind}> in a text beside other places of their {kind}s; it stays text"
        for box in BOXES if conversation.objects is None else ():
            if any(box in text for text in texts):
                yield f"write {box} and have no objects; it stays text"


MOST_TOKENS = 3  # that a line names


def start_notes(samples: list[SourceSample], encoder) -> list[str]:
    """Return the lines about each source; those about its media stand beside its drops, too."""
    encoder.drops.hints[:] = first_notes(samples, takes_columns=not encoder.documents.needs_reply)
    return [*encoder.drops.hints, *template_notes(samples, encoder)]


def template_notes(samples: list[SourceSample], encoder) -> Iterator[str]:
    """Lines about what the template does not write of each source, and the control tokens typed in it."""
    chat, drops_thinking = encoder.documents.chat, encoder.data.thinking == "drop"
    for sample in samples:
        count = typing = 0
        unwritten: Counter[str] = Counter()
        typed: Counter[str] = Counter()
        for messages, tools in _conversations(sample):
            if drops_thinking:
                messages = [*map(without_thinking, messages)]
            count += 1
            unwritten.update(chat.unwritten(messages, tools))
            tokens = chat.typed(messages, tools)
            typed.update(tokens)
            typing += bool(tokens)
        records = f"of {count} records looked at"
        if unwritten:
            parts = ", ".join(f"{part} of {number}" for part, number in unwritten.items())
            yield f"data: {sample.name}: the template leaves out {parts} {records}"
        if typed:
            tokens = listed([token for token, _ in typed.most_common()], MOST_TOKENS, " or ")
            yield f"data: {sample.name}: {typing} {records} have text like {tokens}, trained as plain text"


def _conversations(sample: SourceSample) -> Iterator[tuple[list[dict], list[dict] | None]]:
    """Messages and tools of the records; no media are read."""
    for conversation in sample.conversations:
        with suppress(BadSample):
            images, videos = map(len, conversation.media.values())
            yield place_media(conversation.messages, images, videos), conversation.tools
