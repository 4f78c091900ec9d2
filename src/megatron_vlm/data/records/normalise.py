"""Brings a record in any layout to one form: a conversation as shards store it, and its media.

A record has turns under one of TURNS, or in one of the layouts of `records.layouts`.
Its media stand under `image(s)` and `video(s)`, or parts of its turns name them, as OpenAI and Qwen write
them. An image is {"type": "image_url", "image_url": {"url": PATH}} or {"type": "image", "image": PATH}, a
video the same with its word, or {"type": "video", "video": [PATHS OF FRAMES], "fps": 2}. A part that names
none stands for the next medium of its record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vlm.data.chatml import PART_TYPES
from megatron_vlm.data.media_limits import LIMITS, limits_beside, named_limits
from megatron_vlm.data.records.columns import MEDIA, REJECTED_TURNS
from megatron_vlm.data.records.layouts import chosen_and_rejected, named_turns
from megatron_vlm.data.turns import sole

TIMES = ("fps", "timestamps")  # of a video's frames
BESIDE = ("system", "tools", *(f"{kind}_limits" for kind in LIMITS))  # what else a conversation has


def normalise(record: dict) -> tuple[dict, dict[str, list]]:
    """(conversation, media) of a record with the package's names. Nothing after it looks for other names.

    The conversation has turns, under their own name, and where there are any, `rejected_messages`, `system`,
    `tools` and the limits of media. Its parts say where media are; the media are, for `image` and `video`,
    what the record names, in order. Raises BadSample for a record without turns in any known layout, and for
    two names of one field that differ.
    """
    media = {kind: _listed(record.get(sole(record, names))) for kind, names in MEDIA.items()}
    name = named_turns(record)
    turns, rejected = chosen_and_rejected(record, name)
    if isinstance(record.get("texts"), list) and not name:  # None stands where a document has no image
        media["image"] = [image for image in media["image"] if image is not None]
    beside = {key: record[key] for key in BESIDE if record.get(key) is not None}
    for kind, items in media.items():
        beside |= limits_beside(kind, items)
    in_parts: dict[str, list] = {kind: [] for kind in MEDIA}
    conversation = {name or "messages": _each_part(turns, lambda part: _place(part, in_parts))}
    if rejected:
        conversation[REJECTED_TURNS] = _each_part(rejected, lambda part: _place(part, {}))
    return conversation | beside, {kind: media[kind] or in_parts[kind] for kind in MEDIA}


def _listed(media: Any) -> list:
    return media if isinstance(media, list) else [media] if media else []


def _each_part(turns: Any, change: Callable[[Any], Any]) -> Any:
    """The turns with what `change` makes of each part."""
    if not isinstance(turns, list):
        return turns
    return [
        turn | {"content": [change(part) for part in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _place(part: Any, media: dict[str, list]) -> Any:
    """The part without its medium, but with the limits of it; a medium that it names is added to `media`."""
    name = part.get("type") if isinstance(part, dict) else None
    kind = PART_TYPES.get(name) if isinstance(name, str) else None
    if kind not in MEDIA:
        return part
    medium = part.get(sole(part, (f"{kind}_url", kind, "url", "path")))
    if isinstance(medium, dict):
        medium = medium.get("url", medium)
    if kind == "video" and isinstance(medium, list):
        medium = {"frames": medium} | {time: part[time] for time in TIMES if part.get(time) is not None}
    if medium is not None:
        media.setdefault(kind, []).append(medium)
    return {"type": name} | named_limits(kind, part | medium if isinstance(medium, dict) else part)
