"""A record of a source → its conversation, and its images and videos as encoded files.

An image is a path, encoded bytes, or Hugging Face's `{"path": ..., "bytes": ...}`. A video is a file in one
of these forms, a list of images, or `{"frames": [images]}` with such a list and `fps` or `timestamps` (see
`data.media.videos`). One that is an object may have limits of its own, see `data.media_limits.LIMITS`.
`data.prepare` and `data.load.hf` read every source through here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.records.normalise import TIMES, normalise


def read_record(record: dict, root: Path) -> tuple[dict, list[bytes], list[bytes | dict]]:
    """The conversation, images and videos of a record, as `normalise` finds them; paths are under `root`.

    Raises BadSample as it does, and for a medium that cannot be read.
    """
    conversation, media = normalise(record)
    images = [_file_bytes(image, root) for image in media["image"]]
    return conversation, images, [_video(video, root) for video in media["video"]]


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
