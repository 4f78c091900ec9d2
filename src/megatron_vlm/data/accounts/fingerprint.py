"""Which data a loader state belongs to: a few fields that are compared before it is used."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

NAMES_OF_CLASSES = ("_class", "_type")  # endings of what a processor's JSON calls itself
VERSION = "transformers"  # the field of its version
UNKNOWN = "unknown"  # equals any other value of a field


def digest(value: Any) -> str:
    """A short hash of JSON data, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ValueError that names every field in which the two differ.

    `pipeline` is a digest that covers what has no field of its own; it is named when nothing else differs.
    """
    same_version = saved.get(VERSION) == current.get(VERSION)
    different = []
    for name in sorted((saved.keys() | current.keys()) - {VERSION}):
        # another version of Transformers may have other settings
        missing = UNKNOWN if name.startswith("processor.") and not same_version else None
        values = saved.get(name, missing), current.get(name, missing)
        if values[0] != values[1] and UNKNOWN not in values:
            different.append(name)
    if different:
        fields = [name for name in different if name != "pipeline"] or ["pipeline"]
        raise ValueError(
            "loader state belongs to another data configuration: "
            + "; ".join(f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}" for name in fields)
            + ". Resume with the settings of the saved run, or begin the data again with data.restart=true."
        )


def encoder_settings(encoder: Any) -> dict:
    """The settings of encoder and processor that decide a sample's tokens and pixels, as JSON data."""
    names = ("seq_length", "over_length", "min_pixels", "max_pixels", "max_patches")
    names += ("video_fps", "video_max_frames", "video_max_pixels", "thinking", "box_format")
    processor = encoder.processor
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    of_calls = ("padding", "truncation")  # these hold what the latest call asked for, not a setting
    of_encoder = {
        "documents": encoder.documents.per_sample,
        "images_or_videos": encoder.needs.images_or_videos,
        "chat_template": digest(encoder.documents.chat.text),
        "tokenizer": digest({name: part for name, part in tokenizer.items() if name not in of_calls}),
    }
    settings = {name: getattr(encoder.data, name) for name in names} | of_encoder
    return settings | {VERSION: version("transformers")} | _processor_settings(processor.to_dict())


def _processor_settings(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a processor and of its parts, as JSON data under dotted names."""
    plain = json.loads(json.dumps(parts, default=str))
    settings = {f"processor.{name}": value for name, value in plain.items() if not isinstance(value, dict)}
    for part, values in plain.items():
        if isinstance(values, dict):
            settings |= {
                f"processor.{part}.{name}": _without_null_sides(value) for name, value in values.items()
            }
    return {name: value for name, value in settings.items() if not name.endswith(NAMES_OF_CLASSES)}


def _without_null_sides(value: Any) -> Any:
    """A size without the sides that it leaves open: some versions of Transformers write them as null."""
    return {side: n for side, n in value.items() if n is not None} if isinstance(value, dict) else value
