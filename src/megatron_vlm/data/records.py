"""A source record → its conversation object, and its images and videos as encoded files.

A record is a dict with `conversations` or `messages` (turns) and `image` or `images`: paths, encoded bytes,
or Hugging Face's `{"path": ..., "bytes": ...}`. In `video` or `videos`, a video is a file in one of these
forms, a list of images, or `{"frames": [images]}` with such a list and `fps` or `timestamps` (see
`data.videos`). `data.prepare` and `data.hf` read every source through here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_vlm.data.chatml import BadSample, cook_chatml_sample, place_media
from megatron_vlm.data.images import decode_image
from megatron_vlm.data.videos import VideoRules, file_extension, plan_video

TURN_KEYS = ("conversations", "messages")
EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "TIFF": "tif",
    "JPEG2000": "jp2",
}  # others: Pillow's format name in lower case


def conversation_of(record: Any) -> dict:
    """The turns of `record` under their own key, with `system` and `tools` where it has them.

    Raises BadSample when there are no turns.
    """
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
    key = next((key for key in TURN_KEYS if record.get(key)), None)
    if key is None:
        raise BadSample("bad_conversation", f"none of {list(TURN_KEYS)} among {sorted(record)}")
    return {name: record[name] for name in (key, "system", "tools") if record.get(name) is not None}


def conversation_json(conversation: dict) -> bytes:
    """As stored in a shard. Raises BadSample for text that no file can hold (a lone surrogate)."""
    try:
        return json.dumps(conversation, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadSample("bad_json", str(error)) from error


def images_of(record: Any, root: Path) -> list[bytes]:
    """The encoded image files of `record`, in order. Raises BadSample for one that cannot be read."""
    if not isinstance(record, dict):
        return []
    images = record.get("images") or record.get("image") or []
    return [_file_bytes(image, root) for image in (images if isinstance(images, list) else [images])]


def videos_of(record: Any, root: Path) -> list[bytes | dict]:
    """The videos of `record`, in order, as `data.videos` takes them. Raises BadSample as `images_of`."""
    if not isinstance(record, dict):
        return []
    videos = record.get("videos") or record.get("video") or []
    return [_video(video, root) for video in (videos if isinstance(videos, list) else [videos])]


def _video(video: Any, root: Path) -> bytes | dict:
    if isinstance(video, list):
        video = {"frames": video}
    if not isinstance(video, dict) or "frames" not in video:
        return _file_bytes(video, root)
    frames = video["frames"] if isinstance(video["frames"], list) else []
    times = {name: video[name] for name in ("fps", "timestamps") if video.get(name) is not None}
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
    try:
        path = (root / media).resolve()
        if path.is_relative_to(root.resolve()):
            return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise BadSample("missing_media", str(error)) from error
    raise BadSample("missing_media", f"{media} leads out of {root}")


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of its column, with None for those a row never had: take them out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def sample_parts(conversation: dict, images: list[bytes], videos: list[bytes | dict]) -> dict[str, bytes]:
    """The files of a sample in a shard, by name, as `data.cookers` reads them.

    Raises BadSample where every encoder would drop the sample.
    """
    messages, _ = cook_chatml_sample(conversation)
    place_media(messages, len(images), len(videos))
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise BadSample("no_trained_tokens", f"no reply; roles are {[m['role'] for m in messages]}")
    files = {f"img{index:03d}.{_extension(image)}": image for index, image in enumerate(images)}
    described = conversation | ({"images": list(files)} if files else {})
    if videos:
        described["videos"] = [_store_video(f"vid{i:03d}", video, files) for i, video in enumerate(videos)]
    return {"json": conversation_json(described), **files}


def _store_video(name: str, video: bytes | dict, files: dict[str, bytes]) -> str | dict:
    """How the conversation names the video, whose files are added to `files`."""
    plan_video(video, VideoRules(max_frames=2))  # raises what no setting can help
    if isinstance(video, bytes):
        name = f"{name}.{file_extension(video)}"
        files[name] = video
        return name
    frames = {f"{name}f{i:04d}.{_extension(frame)}": frame for i, frame in enumerate(video["frames"])}
    files.update(frames)
    return video | {"frames": list(frames)}


def _extension(image: bytes) -> str:
    decode_image(image)
    format = Image.open(io.BytesIO(image)).format
    return EXTENSIONS.get(format, format.lower())
