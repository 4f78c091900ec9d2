"""What image processors count and resize."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.data.conversation.turns import BadSample


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
