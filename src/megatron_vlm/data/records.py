"""A source record → its conversation object and its images as encoded files.

A record is a dict with `conversations` or `messages` (turns) and `image` or `images`: paths, encoded bytes,
or Hugging Face's `{"path": ..., "bytes": ...}`; without these, the images that parts of turns name (OpenAI's
`image_url`). `data.prepare` and `data.hf` read every source through here, other layouts after `data.layouts`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_vlm.data.chatml import DOCUMENT, BadSample, cook_chatml_sample, place_media
from megatron_vlm.data.images import decode_image
from megatron_vlm.data.layouts import IMAGES, TURNS
from megatron_vlm.data.media import read_media

TRAINED = ("assistant", DOCUMENT)
IMAGE_PARTS = ("image", "image_url")
IMAGE_PART_KEYS = ("image_url", "image", "url", "path")
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
    key = next((key for key in TURNS if record.get(key)), None)
    if key is None:
        raise BadSample("bad_conversation", f"none of {list(TURNS)} among {sorted(record)}")
    others = {name: record[name] for name in ("system", "tools") if record.get(name) is not None}
    return {key: _without_media(record[key])} | others


def _without_media(turns: Any) -> Any:
    """Parts say where an image is; the image itself goes with the sample's others."""
    if not isinstance(turns, list):
        return turns
    return [
        turn | {"content": [_part_without_media(part) for part in turn["content"]]}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _part_without_media(part: Any) -> Any:
    return {"type": part["type"]} if isinstance(part, dict) and part.get("type") in IMAGE_PARTS else part


def conversation_json(conversation: dict) -> bytes:
    """As stored in a shard. Raises BadSample for text that no file can hold (a lone surrogate)."""
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
        images = list(_images_of_parts(record))
    return [_image_bytes(image, root) for image in (images if isinstance(images, list) else [images])]


def _images_of_parts(record: dict) -> Iterator[Any]:
    """What OpenAI's and Qwen's parts of turns name: {"type": "image_url", "image_url": {"url": ...}}."""
    turns = next((record[name] for name in TURNS if record.get(name)), ())
    for turn in turns if isinstance(turns, list) else ():
        parts = turn.get("content") if isinstance(turn, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                named = next((part[name] for name in IMAGE_PART_KEYS if part.get(name)), None)
                if named is not None:
                    yield named.get("url", named) if isinstance(named, dict) else named


def _image_bytes(image: Any, root: Path) -> bytes:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise BadSample(
            "missing_media", f"an image is a path or encoded bytes, this is {type(image).__name__}"
        )
    return read_media(image, root)


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
    if not any(message["role"] in TRAINED and message["content"] for message in messages):
        raise BadSample("no_trained_tokens", f"no reply; roles are {[m['role'] for m in messages]}")
    return [_extension(image) for image in images]


def _extension(image: bytes) -> str:
    decode_image(image)
    format = Image.open(io.BytesIO(image)).format
    return EXTENSIONS.get(format, format.lower())
