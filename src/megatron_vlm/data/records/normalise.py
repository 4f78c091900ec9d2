"""A record in any layout → its conversation as shards store it, and its media, named or read.

A record has turns under one of TURNS, or in one of the layouts of `records.layouts`. Its media stand under
`image(s)` and `video(s)`, or parts of its turns name them, as OpenAI and Qwen write them. An image is
{"type": "image_url", "image_url": {"url": PATH}} or {"type": "image", "image": PATH}, a video the same with
its word, or {"type": "video", "video": [PATHS OF FRAMES], "fps": 2}. A part that names none stands for the
next medium of its record.

An image is a path, encoded bytes, or Hugging Face's `{"path": ..., "bytes": ...}`. A video is a file in one
of these forms, a list of images, or `{"frames": [images]}` with such a list and `fps` or `timestamps` (see
`data.media.videos`). One that is an object may have limits of its own, see `conversation.limits`.
"""

from pathlib import Path
from typing import Any

from megatron_vlm.data.conversation.chatml import PART_TYPES, BadSample
from megatron_vlm.data.conversation.limits import LIMITS, limits_beside, named_limits
from megatron_vlm.data.conversation.turns import sole
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.on_disk.fields import MEDIA, REJECTED_TURNS
from megatron_vlm.data.records.layouts import chosen_and_rejected, named_turns

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
    conversation = {name or "messages": _without_media(turns, in_parts)}
    if rejected:
        conversation[REJECTED_TURNS] = _without_media(rejected, {})
    return conversation | beside, {kind: media[kind] or in_parts[kind] for kind in MEDIA}


def read_record(record: dict, root: Path) -> tuple[dict, list[bytes], list[bytes | dict]]:
    """The conversation, images and videos of a record, as `normalise` finds them; paths are under `root`.

    Raises BadSample as it does, and for a medium that cannot be read.
    """
    conversation, media = normalise(record)
    images = [_file_bytes(image, root) for image in media["image"]]
    return conversation, images, [_video(video, root) for video in media["video"]]


def _listed(media: Any) -> list:
    return media if isinstance(media, list) else [media] if media else []


def _without_media(turns: Any, media: dict[str, list]) -> Any:
    """The turns, whose parts only say where media are; media that parts name are added to `media`."""
    if not isinstance(turns, list):
        return turns
    return [
        turn | {"content": [_place(part, media) for part in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _place(part: Any, media: dict[str, list]) -> Any:
    """The part without its medium, but with the limits of it."""
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


def _video(video: Any, root: Path) -> bytes | dict:
    if isinstance(video, list):
        video = {"frames": video}
    if not isinstance(video, dict) or "frames" not in video:
        return _file_bytes(video, root)
    frames = video["frames"] if isinstance(video["frames"], list) else []
    times = {name: video[name] for name in TIMES if video.get(name) is not None}
    return {"frames": [_file_bytes(frame, root) for frame in frames]} | times


def _file_bytes(media: Any, root: Path) -> bytes:
    if isinstance(media, dict):
        media = media.get("bytes") or media.get("path")
    if isinstance(media, bytes):
        return media
    if not isinstance(media, str):
        raise BadSample(
            "missing_media", f"a media item is a path or encoded bytes, this is {type(media).__name__}"
        )
    return read_media(media, root)
