"""Limits of single images and videos, which a record names beside those of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.data.turns import BadSample

# Qwen's words for a part that is an image or a video, and for an entry of `images` or `videos`
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
    """As they stand in an entry of a record's images or videos. The `fps` of a list of frames is no limit."""
    if not isinstance(item, dict):
        return {}
    names = [name for name in LIMITS[kind] if name != "fps" or "frames" not in item]
    return {name: item[name] for name in names if item.get(name) is not None}


def limits_beside(kind: str, media: Any) -> dict[str, list[dict]]:
    """What stands beside a conversation's turns if any entry of a record's media names limits."""
    limits = [named_limits(kind, item) for item in (media if isinstance(media, list) else [media])]
    return {f"{kind}_limits": limits} if any(limits) else {}


def with_limits(messages: list[dict], conversation: Any) -> list[dict]:
    """The messages, whose parts of media also have what `limits_beside` put beside them. Raises BadSample."""
    for kind in LIMITS:
        limits = conversation.get(f"{kind}_limits") if isinstance(conversation, dict) else None
        if limits is None:
            continue
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        if not isinstance(limits, list) or [type(one) for one in limits] != [dict] * len(parts):
            raise BadSample("bad_conversation", f"{kind}_limits is no list of an object for each {kind}")
        beside = (limits_of(kind, one) for one in limits)
        messages = [
            message | {"content": [p | next(beside) if p["type"] == kind else p for p in message["content"]]}
            for message in messages
        ]
    return messages


def limits_of_media(messages: list[dict]) -> dict[str, list[dict]]:
    """For each image and each video of a conversation, in order, its limits."""
    parts = [part for message in messages for part in message["content"]]
    return {kind: [limits_of(kind, part) for part in parts if part["type"] == kind] for kind in LIMITS}


def count_tokens(processor: Any, size: tuple[int, int]) -> Mapping[str, list[int]] | None:
    """What a processor says of the tokens of an image of (height, width); None if it counts none."""
    cropped = one_size(processor.image_processor)
    # LLaVA's asks its image processor for the size of a crop; SigLIP's does not crop
    for options in ({}, {"crop_size": cropped and dict(cropped)}):
        with suppress(AttributeError, TypeError):
            return processor._get_num_multimodal_tokens([size], **options)
    return None


def one_size(images: Any) -> Mapping[str, int] | None:
    """The `height` and `width` to which an image processor brings all images, or all tiles of images."""
    if hasattr(images, "max_image_tokens"):  # LFM2-VL's size is that of tiles, and images have their own
        return None
    for size in (getattr(images, "do_center_crop", None) and images.crop_size, images.size):
        if size and size.get("height"):
            return size
    return None


def fixed_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image that is resized or cut to one size for all images, as for Gemma3."""
    size = one_size(processor.image_processor)
    return size["height"], size["width"]


def refuse_narrow(least: int, most: int) -> None:
    """Raises ConfigError if the fewest and the most tokens of an image in its own size are so close that
    images up to 1:3, scaled up to the fewest, can have more than the most: Transformers fails on these."""
    if (needed := most_when_scaled_up(least)) > most:
        raise ConfigError(
            f"image processor: with min_image_tokens {least} a small image, scaled up, has up to {needed} "
            f"tokens, and max_image_tokens is {most}: such images would be lost; raise max_image_tokens to "
            f"{needed}, or lower min_image_tokens."
        )


def most_when_scaled_up(least: int, aspect: int = 3) -> int:
    """The most tokens of an image up to 1:`aspect` that LFM2-VL's processor scales up to `least`: it rounds
    both sides up to whole tokens."""
    shortest, longest = math.ceil(math.sqrt(least)), math.ceil(math.sqrt(aspect * least))
    # just over n - 1 tokens wide become n
    return max(n * math.ceil(least / max(n - 1, math.sqrt(least))) for n in range(shortest, longest + 1))


def pixels_within(
    own: dict, most: int | None, least: int | None, processor: Any
) -> tuple[int | None, int | None]:
    """The most and fewest pixels of an image: the run's, or its own, moved to lie within the run's. Raises
    BadSample if its processor makes all images one size."""
    if own and one_size(processor.image_processor):
        name, said = type(processor).__name__, ", ".join(own)
        detail = f"{name} makes all images one size: {said} of an image has no effect; remove it"
        raise BadSample("processor_error", detail)
    within = {name: min(max(pixels, least or 0), most or math.inf) for name, pixels in own.items()}
    return within.get("max_pixels", most), within.get("min_pixels", least)


def rules_within(own: dict, rules: Any) -> Any:
    """The run's `VideoRules`, or what a video says itself where that is less."""
    now = {name: getattr(rules, name) or math.inf for name in own}
    return replace(rules, **{name: min(value, now[name]) for name, value in own.items()})
