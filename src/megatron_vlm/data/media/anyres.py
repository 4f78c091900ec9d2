"""Images in tiles as LLaVA-OneVision's processor makes them: a conversation's only image has several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import ProcessorMixin
from transformers.image_processing_utils import select_best_resolution

# Pixels along a patch's side if nothing tells: that of SigLIP, Gemma3's tower.
PATCH_SIZE = 14


def is_anyres(processor: ProcessorMixin) -> bool:
    """Whether the images of a conversation depend on how many they are."""
    return "batch_num_images" in processor.image_processor.model_input_names


def unsaid_patch_size(processor: ProcessorMixin) -> int:
    """Pixels along a patch's side where the processor does not say; this one says how many a tile has."""
    if not is_anyres(processor):
        return PATCH_SIZE
    return processor.image_processor.size["height"] // math.isqrt(processor.num_image_tokens)


def arranged(processor: ProcessorMixin, images: Sequence[Any]) -> Sequence[Any]:
    """The images of one conversation as `apply_chat_template` hands them to the processor, if it matters."""
    return [images] if images and is_anyres(processor) else images


def count(processor: ProcessorMixin, height: int, width: int, alone: bool) -> tuple[int, int]:
    """The number of tokens and of raw patches of an image, which is the only one or not."""
    of_tile = processor.num_image_tokens
    if not alone:
        return of_tile + 1, of_tile  # the end of a row behind it
    images = processor.image_processor
    best = select_best_resolution((height, width), images.image_grid_pinpoints)
    tiles = 1 + (best[0] // images.size["height"]) * (best[1] // images.size["width"])
    return processor._get_num_multimodal_tokens([(height, width)])["num_image_tokens"][0], of_tile * tiles
