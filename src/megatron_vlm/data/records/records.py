"""A source record → its conversation object, and its images and videos as encoded files.

A record is a dict with `conversations` or `messages` (turns) and `image` or `images`: paths, encoded bytes,
or Hugging Face's `{"path": ..., "bytes": ...}`. In `video` or `videos`, a video is a file in one of these
forms, a list of images, or `{"frames": [images]}` with such a list and `fps` or `timestamps` (see
`data.media.videos`). Without these fields, its media are those that parts of turns name (`records.parts`). An
image or a video that is an object may have limits of its own, see `data.media_limits.LIMITS`. `data.prepare`
and `data.load.hf` read every source through here; other layouts go through `data.records.columns` first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.media_limits import limits_beside
from megatron_vlm.data.records.columns import TURNS
from megatron_vlm.data.records.parts import MEDIA, TIMES, media_of_parts, without_media
from megatron_vlm.data.records.preferences import REJECTED_TURNS


def conversation_of(record: dict) -> dict:
    """The turns of `record` under their own key, with `system` and `tools` where it has them."""
    key = next((key for key in TURNS if record.get(key)), TURNS[0])
    others = {name: record[name] for name in ("system", "tools") if record.get(name) is not None}
    for kind, names in MEDIA.items():
        others |= limits_beside(kind, next((record[name] for name in names if record.get(name)), []))
    return {each: without_media(record[each]) for each in (key, REJECTED_TURNS) if record.get(each)} | others


def conversation_json(conversation: dict) -> bytes:
    """The conversation as a shard stores it. Raises BadSample if no file can hold it (a lone surrogate)."""
    try:
        return json.dumps(conversation, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadSample("bad_json", str(error)) from error


def images_of(record: dict, root: Path) -> list[bytes]:
    """The encoded image files of `record`, in order. Raises BadSample for one that cannot be read."""
    return [_file_bytes(image, root) for image in media_of(record, "image")]


def videos_of(record: dict, root: Path) -> list[bytes | dict]:
    """The videos of `record`, in order, as `media.videos` takes them. Raises BadSample as `images_of`."""
    return [_video(video, root) for video in media_of(record, "video")]


def media_of(record: dict, kind: str) -> list:
    """The images or the videos of a record, as it names them."""
    media = next((record[name] for name in MEDIA[kind] if record.get(name)), None)
    if media is None:
        return list(media_of_parts(record, kind))
    return media if isinstance(media, list) else [media]


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


def without_nulls(value: Any) -> Any:
    """The value without keys that hold None: Arrow gives every struct all keys of its column."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
