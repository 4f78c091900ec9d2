"""Media that parts of turns name, as OpenAI and Qwen write them.

An image is {"type": "image_url", "image_url": {"url": PATH}} or {"type": "image", "image": PATH}, a video the
same with its word, or {"type": "video", "video": [PATHS OF FRAMES], "fps": 2}. A part that names none stands
for the next medium of its record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_vlm.data.chatml import PART_TYPES
from megatron_vlm.data.media_limits import named_limits
from megatron_vlm.data.records.columns import IMAGES, TURNS, VIDEOS
from megatron_vlm.data.turns import sole

TIMES = ("fps", "timestamps")  # of a video's frames
MEDIA = {"image": IMAGES, "video": VIDEOS}  # a record's names for each kind


def media_of_parts(record: dict, kind: str) -> Iterator[Any]:
    """The images or the videos that a record's parts name, as `records.records` reads them."""
    turns = next((record[name] for name in TURNS if record.get(name)), ())
    for turn in turns if isinstance(turns, list) else ():
        parts = turn.get("content") if isinstance(turn, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if _kind(part) == kind and (named := _named(part, kind)) is not None:
                yield named


def _named(part: dict, kind: str) -> Any:
    """A file, or frames with their times; None if the part only says where a medium of the record stands."""
    named = part.get(sole(part, (f"{kind}_url", kind, "url", "path")))
    if isinstance(named, dict):
        return named.get("url", named)
    if kind == "video" and isinstance(named, list):
        return {"frames": named} | {name: part[name] for name in TIMES if part.get(name) is not None}
    return named


def _kind(part: Any) -> str | None:
    """Of the medium that a part stands for, if any."""
    name = part.get("type") if isinstance(part, dict) else None
    kind = PART_TYPES.get(name) if isinstance(name, str) else None
    return kind if kind in MEDIA else None


def without_media(turns: Any) -> Any:
    """The turns whose parts only say where a medium is; itself it goes with the sample's others."""
    if not isinstance(turns, list):
        return turns
    return [
        turn | {"content": [_without_medium(part) for part in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _without_medium(part: Any) -> Any:
    kind = _kind(part)
    if kind is None:
        return part
    named = _named(part, kind)
    return {"type": part["type"]} | named_limits(kind, part | named if isinstance(named, dict) else part)
