"""Tells a user by a source's first records what is not read, or not as it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.data.conversation.chatml import BadSample, cook_chatml_sample
from megatron_vlm.data.on_disk.fields import MEDIA
from megatron_vlm.data.on_disk.named import is_path, meant
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.on_disk.placeholders import foreign_placeholders, stand_for
from megatron_vlm.data.records.blends import Blend, Table
from megatron_vlm.data.records.normalise import normalise
from megatron_vlm.data.records.streams import StreamedRows
from megatron_vlm.messages import printable

LOOKED_AT = 100  # records of each source, from its first to its last
Record = tuple[dict, Path, dict, dict[str, list]]  # root of its media; what `normalise` makes of it


def first_notes(table: Table | StreamedRows) -> Iterator[str]:
    """Lines about each source by its first records: media that are not read, and what is read in another form
    than it is written. There are none about a stream, as reading it would take its records."""
    if isinstance(table, StreamedRows):
        return
    for part in table.tables.values() if isinstance(table, Blend) else [table]:
        if records := list(_some_records(part)):
            for note in (*_unread(records), *_other_paths(records), *_placeholders(records)):
                yield f"data: {printable(part.origin(0)[0])}: {note}"


def _some_records(table: Table) -> Iterator[Record]:
    """Valid records, as far apart as they are few: another spelling may begin anywhere."""
    for index in np.linspace(0, len(table) - 1, min(LOOKED_AT, len(table)), dtype=int):
        with suppress(BadSample):
            record, root = table.record(int(index))
            yield record, root, *normalise(record)


def _unread(records: list[Record]) -> Iterator[str]:
    """Columns that look like media, if no record has any that are read."""
    if any(any(media.values()) for *_, media in records):
        return
    items = [item for record, *_ in records for item in record.items()]
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


def _other_paths(records: list[Record]) -> Iterator[str]:
    """Paths that exist in another form."""
    found = []
    for _, root, _, media in records:
        for name in (name for named in media.values() for name in named if is_path(name)):
            with suppress(OSError):
                if not os.path.lexists(root / name) and (path := meant(name, root)):
                    found.append((name, path.relative_to(root)))
    if found:
        name, path = found[0]
        yield (
            f"{len(found)} media paths of {len(records)} records looked at differ from those of files in "
            f"slashes, case or spaces; '{printable(name)}' is read as {printable(path)}"
        )


def _placeholders(records: list[Record]) -> Iterator[str]:
    """Placeholders of other models: what becomes of them."""
    for kind in MEDIA:
        read, left = [], []
        for *_, conversation, media in records:
            with suppress(BadSample):
                messages, _ = cook_chatml_sample(conversation)
                known = any(part["type"] == kind for message in messages for part in message["content"])
                if media[kind] and (foreign := foreign_placeholders(messages, kind)):
                    fit = not known and stand_for(foreign, len(media[kind]))
                    (read if fit else left).append(printable(foreign[0]))
        begin = f"of {len(records)} records looked at write"
        if read:
            yield f"{len(read)} {begin} {read[0]} where their {kind}s stand; it is read as <{kind}>"
        if left:
            yield (
                f"{len(left)} {begin} {left[0]} not once for each of their {kind}s, so it stays text; write "
                f"<{kind}> there instead"
            )
