"""A source record → its conversation object and its images as encoded files.

A record is a dict with `conversations` or `messages` (turns) and `image` or `images`: paths, encoded bytes,
or Hugging Face's `{"path": ..., "bytes": ...}`. `data.prepare` and `data.hf` read every source through here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_vlm.data.chatml import BadSample, cook_chatml_sample, place_media
from megatron_vlm.data.images import decode_image

TURN_KEYS = ("conversations", "messages")
EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "TIFF": "tif",
    "JPEG2000": "jp2",
}  # others: Pillow's format name in lower case


def conversation_of(record: Any) -> dict:
    """The turns of `record` under their own key, with `system` and `tools` where it has them.

    Raises BadSample when there are no turns, or when the record carries video.
    """
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
    if record.get("video") or record.get("videos"):
        raise BadSample("video_unsupported", "the record carries video")
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
    return [_image_bytes(image, root) for image in (images if isinstance(images, list) else [images])]


def _image_bytes(image: Any, root: Path) -> bytes:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise BadSample(
            "missing_media", f"an image is a path or encoded bytes, this is {type(image).__name__}"
        )
    try:
        path = (root / image).resolve()
        if path.is_relative_to(root.resolve()):
            return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the path; links in a circle
        raise BadSample("missing_media", str(error)) from error
    raise BadSample("missing_media", f"{image} leads out of {root}")


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of its column, with None for those a row never had: take them out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def check_sample(conversation: dict, images: list[bytes]) -> list[str]:
    """The file extension of every image; raises BadSample where the encoder would drop the sample."""
    messages, _ = cook_chatml_sample(conversation)
    place_media(messages, images=len(images))
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise BadSample("no_trained_tokens", f"no reply; roles are {[m['role'] for m in messages]}")
    return [_extension(image) for image in images]


def _extension(image: bytes) -> str:
    decode_image(image)
    format = Image.open(io.BytesIO(image)).format
    return EXTENSIONS.get(format, format.lower())
