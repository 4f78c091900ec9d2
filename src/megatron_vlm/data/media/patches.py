"""Images and frames cut into patches for towers that merge squares of them (Qwen-VL's, GLM-V's), and the size
to which Pixtral's processor brings an image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size


def of_image(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    """The patches of an image (H, W, 3), and its grid."""
    side = processor.image_processor.patch_size
    grid = np.array([[1, image.shape[0] // side, image.shape[1] // side]])
    return {
        "pixel_values": of_frames(processor.image_processor, image[None]),
        "image_grid_thw": torch.from_numpy(grid),
    }


def of_frames(part: Any, frames: np.ndarray, moments: int = 1) -> Tensor:
    """The patches of frames (T, H, W, 3), one per row, in the order in which the tower merges patches.

    A patch spans `moments` frames.
    """
    side, merge = part.patch_size, part.merge_size
    times, height, width, _ = frames.shape
    # a line of a patch is copied as one opaque value, not colour by colour
    lines = np.ascontiguousarray(frames).reshape(times, height, width * 3).view(f"V{3 * side}")
    across = width // side // merge
    cut = lines.reshape(times // moments, moments, height // side // merge, merge, side, across, merge)
    # The tower merges squares of merge x merge patches, so the patches of a square follow one another: time,
    # row and column of the square, row and column of the patch in it, then its moments and lines.
    merged = np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 1, 4))
    return torch.from_numpy(merged.view(np.uint8).reshape(-1, moments * side * side * 3))


def pixtral_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image that is scaled to fit a square and rounded up to whole image tokens."""
    longest = processor.image_processor.size["longest_edge"]
    merged = processor.patch_size * processor.spatial_merge_size
    image = np.broadcast_to(np.uint8(0), (3, height, width))  # the function only looks at the shape
    return get_resize_output_image_size(image, size=(longest, longest), patch_size=(merged, merged))
