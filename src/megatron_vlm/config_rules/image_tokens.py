"""Limits of the tokens of an image in its own size, as image processors and `compose` name them; no torch."""

import math

from megatron_vlm.config import ConfigError


def refuse_narrow(least: int, most: int) -> None:
    """Refuse limits of an image's tokens that are too close to each other.

    Raises ConfigError if images up to 1:3, scaled up to the fewest tokens, can have more than the most:
    Transformers fails on these.
    """
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
