"""A source record → its conversation object, and its images and videos as encoded files.

A record is a dict with `conversations` or `messages` (turns) and `image` or `images`: paths, encoded bytes,
or Hugging Face's `{"path": ..., "bytes": ...}`. Without these, its images are those that parts of turns name
(OpenAI's `image_url`). In `video` or `videos`, a video is a file in one of these forms, a list of images, or
`{"frames": [images]}` with such a list and `fps` or `timestamps` (see `data.media.videos`). An image or a
video that is an object may have limits of its own, see `data.media_limits.LIMITS`. `data.prepare`
and `data.load.hf` read every source through here; other layouts go through `data.records.columns` first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.media_limits import limits_beside, named_limits
from megatron_vlm.data.records.columns import IMAGES, TURNS, VIDEOS
from megatron_vlm.data.records.preferences import REJECTED_TURNS
from megatron_vlm.data.turns import sole

IMAGE_PARTS = ("image", "image_url")
IMAGE_PART_KEYS = ("image_url", "image", "url", "path")


def conversation_of(record: Any) -> dict:
    """The turns of `record` under their own key, with `system` and `tools` where it has them.

    Raises BadSample when there are no turns.
    """
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
    key = next((key for key in TURNS if record.get(key)), None)
    if key is None:
        raise BadSample("bad_conversation", f"none of {list(TURNS)} among {sorted(record)}")
    others = {name: record[name] for name in ("system", "tools") if record.get(name) is not None}
    for kind, names in (("image", IMAGES), ("video", VIDEOS)):
        others |= limits_beside(kind, next((record[name] for name in names if record.get(name)), []))
    return {each: _without_media(record[each]) for each in (key, REJECTED_TURNS) if record.get(each)} | others


def _without_media(turns: Any) -> Any:
    """The turns whose parts only say where an image is; the image itself goes with the sample's others."""
    if not isinstance(turns, list):
        return turns
    return [
        turn | {"content": [_part_without_media(part) for part in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _part_without_media(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS:
        return part
    return {"type": part["type"]} | named_limits("image", part)


def conversation_json(conversation: dict) -> bytes:
    """The conversation as a shard stores it. Raises BadSample if no file can hold it (a lone surrogate)."""
    try:
        return json.dumps(conversation, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadSample("bad_json", str(error)) from error


def images_of(record: Any, root: Path) -> list[bytes]:
    """The encoded image files of `record`, in order. Raises BadSample for one that cannot be read."""
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        return []
    images = next((record[name] for name in IMAGES if record.get(name)), None)
    if images is None:
        images = list(images_of_parts(record))
    return [_file_bytes(image, root) for image in (images if isinstance(images, list) else [images])]


def videos_of(record: Any, root: Path) -> list[bytes | dict]:
    """The videos of `record`, in order, as `media.videos` takes them. Raises BadSample as `images_of`."""
    if not isinstance(record, dict):
        return []
    videos = next((record[name] for name in VIDEOS if record.get(name)), [])
    return [_video(video, root) for video in (videos if isinstance(videos, list) else [videos])]


def _video(video: Any, root: Path) -> bytes | dict:
    if isinstance(video, list):
        video = {"frames": video}
    if not isinstance(video, dict) or "frames" not in video:
        return _file_bytes(video, root)
    frames = video["frames"] if isinstance(video["frames"], list) else []
    times = {name: video[name] for name in ("fps", "timestamps") if video.get(name) is not None}
    return {"frames": [_file_bytes(frame, root) for frame in frames]} | times


def images_of_parts(record: dict) -> Iterator[Any]:
    """The images that OpenAI's and Qwen's parts name: {"type": "image_url", "image_url": {"url": ...}}."""
    turns = next((record[name] for name in TURNS if record.get(name)), ())
    for turn in turns if isinstance(turns, list) else ():
        parts = turn.get("content") if isinstance(turn, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                named = part.get(sole(part, IMAGE_PART_KEYS))
                if named is not None:
                    yield named.get("url", named) if isinstance(named, dict) else named


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
