"""Limits of single images and videos, which a record names beside the limits of the run."""

import math
from collections.abc import Mapping
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample

SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
# The words of qwen-vl-utils for a part that is an image or a video, and for an entry of `images` or `videos`
LIMITS = {
    "image": SIZES,
    "video": (
        *SIZES,
        *("total_pixels", "video_start", "video_end", "fps", "nframes", "num_frames"),
        *("min_frames", "max_frames", "sample_fps", "raw_fps"),
    ),
}
# Beside the turns these may also be facts about a file, such as the frames per second that it has.
ALSO_FACTS = ("fps", "raw_fps")
MOST = 2**53  # of any limit; NaN is not below it
REAL = ("fps", "sample_fps", "raw_fps", "video_start", "video_end")  # the others are whole numbers
PAIRS = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))


def limits_of(kind: str, item: Mapping[str, Any]) -> dict[str, float]:
    """Return the LIMITS that an image or a video names, `num_frames` under the name `nframes`.

    Raises:
        BadSample: one is no positive number, or no whole one where something is counted; or two contradict.
    """
    limits = {name: _number(item[name]) for name in LIMITS[kind] if item.get(name) is not None}
    for name, value in limits.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
        minimum = 0 if name == "video_start" else math.ulp(0)
        if not number or value < minimum or (name not in REAL and value != int(value)):
            expected = "number" if name in REAL else "whole number"
            raise BadSample("bad_conversation", f"{kind} has {name} {value!r}, not a positive {expected}")
    for low, high in PAIRS:
        if limits.get(low, 0) > limits.get(high, math.inf):
            detail = f"{kind} has {low} {limits[low]} over {high} {limits[high]}"
            raise BadSample("bad_conversation", detail)
    if ("resized_height" in limits) != ("resized_width" in limits):
        raise BadSample("bad_conversation", f"{kind} has one of resized_height and resized_width; give both")
    nframes = limits.pop("num_frames", None)
    if nframes is not None and limits.setdefault("nframes", nframes) != nframes:
        raise BadSample("bad_conversation", f"{kind} has nframes and num_frames, which differ")
    if "nframes" in limits and "fps" in limits:
        raise BadSample("bad_conversation", f"{kind} has fps and nframes; leave one out")
    return {name: value if name in REAL else int(value) for name, value in limits.items()}


def _number(value: Any) -> Any:
    """Return the number in a cell of a CSV file; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def named_limits(kind: str, item: Any) -> dict:
    """The limits in an entry of a record's images or videos. The `fps` of a list of frames is no limit."""
    if not isinstance(item, dict):
        return {}
    names = [name for name in LIMITS[kind] if name != "fps" or "frames" not in item]
    return {name: item[name] for name in names if item.get(name) is not None}


def limits_beside(kind: str, media: list, record: Mapping[str, Any]) -> list[dict] | None:
    """Return the limits of each medium that a record, or its entry there, names; None if there are none.

    What stands in the record itself is for all its images or videos; a list has one for each.
    """
    names = [name for name in LIMITS[kind] if media and name in record and name not in ALSO_FACTS]
    record = {name: record[name] for name in names if record[name] is not None}
    limits = []
    for number, item in enumerate(media):
        of_all = dict(record)
        for name, value in of_all.items():
            if isinstance(value, list):
                if len(value) != len(media):
                    detail = f"{name} has {len(value)} values for {len(media)} {kind}s"
                    raise BadSample("bad_conversation", detail)
                of_all[name] = value[number]
        limits.append(of_all | named_limits(kind, item))
    return limits if any(limits) else None


def limits_of_media(messages: list[dict], named_beside: Mapping[str, Any]) -> dict[str, list[dict]]:
    """Return the limits of each image and each video of a conversation, in order: what its parts name, and
    what `limits_beside` found beside its turns. Raises BadSample."""
    limits = {}
    for kind in LIMITS:
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        beside = named_beside.get(kind) or [{}] * len(parts)
        if not isinstance(beside, list) or [type(item) for item in beside] != [dict] * len(parts):
            raise BadSample("bad_conversation", f"{kind}_limits is no list of an object for each {kind}")
        limits[kind] = [limits_of(kind, item | part) for part, item in zip(parts, beside, strict=True)]
    return limits
