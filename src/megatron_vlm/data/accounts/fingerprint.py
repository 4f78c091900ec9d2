"""Which data a loader state belongs to: a few fields that are compared before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

MEDIA_PROCESSORS = ("image_processor", "video_processor")
IMAGE_SETTINGS = ("size", "patch_size", "merge_size", "temporal_patch_size", "resample")
IMAGE_SETTINGS += ("image_mean", "image_std", "image_seq_length")
UNKNOWN = "unknown"  # equals any other value of a field


def digest(value: Any) -> str:
    """A short hash of JSON data, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ValueError that names every field in which the two differ.

    `pipeline` is a digest that covers what has no field of its own; it is named when nothing else differs.
    """
    different = _different(saved, current, saved.keys() | current.keys())
    if different:
        named = sorted(set(different) - {"pipeline"}) or ["pipeline"]
        raise ValueError(
            "loader state belongs to another data configuration: "
            + "; ".join(f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}" for name in named)
            + ". Resume with the settings of the saved run, or begin the data again with data.restart=true."
        )


def data_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields about rows and processor in which two fingerprints differ; the order of rows may differ."""
    return _different(saved, current, ("dataset", "shards", "chat_template", "tokenizer", "processor"))


def _different(saved: Mapping[str, Any], current: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    pairs = {name: (saved.get(name), current.get(name)) for name in names}
    return [name for name, pair in pairs.items() if pair[0] != pair[1] and UNKNOWN not in pair]


def encoder_settings(encoder: Any) -> dict:
    """The settings of encoder and processor that decide a sample's tokens and pixels, as JSON data."""
    names = ("seq_length", "over_length", "min_pixels", "max_pixels", "max_patches")
    names += ("video_fps", "video_max_frames", "video_max_pixels", "thinking")
    processor, kind = encoder.processor, encoder.documents.processing.kind
    parts = [getattr(processor, name, None) for name in MEDIA_PROCESSORS]
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    of_calls = ("padding", "truncation")  # these hold what the latest call asked for, not a setting
    return {name: getattr(encoder.data, name) for name in names} | {
        "documents": encoder.documents.per_sample,
        "images_or_videos": encoder.needs.images_or_videos,
        "chat_template": digest(encoder.documents.chat.text),
        "tokenizer": digest({name: part for name, part in tokenizer.items() if name not in of_calls}),
        "processor": digest([_image_settings(part, kind.settings) for part in parts]),
    }


def _image_settings(processor: Any | None, of_kind: tuple[str, ...]) -> dict:
    """The settings that matter; a later version of Transformers may have more."""
    found = {name: getattr(processor, name, None) for name in IMAGE_SETTINGS if name != "size"}
    found |= {name: value for name in of_kind if (value := getattr(processor, name, None)) is not None}
    size = dict(getattr(processor, "size", None) or {})
    return found | {"size": {side: pixels for side, pixels in size.items() if pixels is not None}}
