"""Limits of single images and videos, which a record names beside the limits of the run."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample

# The usual words for a part that is an image or a video, and for an entry of `images` or `videos`
LIMITS = {"image": ("min_pixels", "max_pixels"), "video": ("fps", "max_frames", "max_pixels")}


def limits_of(kind: str, item: Mapping[str, Any]) -> dict[str, float]:
    """The LIMITS that an image or a video names. Raises BadSample for one that is no positive number, or no
    whole one where something is counted."""
    found = {name: item[name] for name in LIMITS[kind] if item.get(name) is not None}
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value <= 0 or (name != "fps" and value != int(value)):
            wanted = "number" if name == "fps" else "whole number"
            raise BadSample("bad_conversation", f"{kind} has {name} {value!r}, not a positive {wanted}")
    if (least := found.get("min_pixels", 0)) > (most := found.get("max_pixels", math.inf)):
        raise BadSample("bad_conversation", f"{kind} has min_pixels {least} over max_pixels {most}")
    return {name: value if name == "fps" else int(value) for name, value in found.items()}


def named_limits(kind: str, item: Any) -> dict:
    """The limits in an entry of a record's images or videos. The `fps` of a list of frames is no limit."""
    if not isinstance(item, dict):
        return {}
    names = [name for name in LIMITS[kind] if name != "fps" or "frames" not in item]
    return {name: item[name] for name in names if item.get(name) is not None}


def limits_beside(kind: str, media: Any) -> dict[str, list[dict]]:
    """The fields that stand beside a conversation's turns if any entry of a record's media names limits."""
    limits = [named_limits(kind, item) for item in (media if isinstance(media, list) else [media])]
    return {f"{kind}_limits": limits} if any(limits) else {}


def limits_of_media(messages: list[dict], conversation: Any) -> dict[str, list[dict]]:
    """The limits of each image and each video of a conversation, in order: what its parts name, and what
    `limits_beside` put beside its turns. Raises BadSample."""
    limits = {}
    for kind in LIMITS:
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        beside = conversation.get(f"{kind}_limits") if isinstance(conversation, dict) else None
        beside = [{}] * len(parts) if beside is None else beside
        if not isinstance(beside, list) or [type(one) for one in beside] != [dict] * len(parts):
            raise BadSample("bad_conversation", f"{kind}_limits is no list of an object for each {kind}")
        limits[kind] = [limits_of(kind, part | one) for part, one in zip(parts, beside, strict=True)]
    return limits


def drawn(source: str, least: int, most: int) -> int:
    """A number of pixels between two, which `source` alone decides: twice as many are as likely anywhere."""
    share = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "big") / 2**64
    return round(least * (most / least) ** share)


def rules_within(own: dict, rules: Any) -> Any:
    """The run's `VideoRules`, or what a video says itself where that is less."""
    now = {name: getattr(rules, name) or math.inf for name in own}
    return replace(rules, **{name: min(value, now[name]) for name, value in own.items()})
