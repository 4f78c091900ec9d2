"""What known processors make of an image that they resize once: its size, its pixels or patches, its ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.glm4v import image_processing_glm4v as glm4v
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2_vl
from transformers.video_utils import VideoMetadata

from megatron_vlm.data.media.videos import VideoPlan

Grid = tuple[int, int, int]  # temporal patches, rows and columns of raw patches
RESAMPLE = {2: tv.InterpolationMode.BILINEAR, 3: tv.InterpolationMode.BICUBIC}  # Pillow's numbers


def resized(pixels: np.ndarray, size: tuple[int, int], resample: Any) -> np.ndarray:
    """An image or frames, (..., H, W, 3) uint8, resized to `size`."""
    if tuple(size) == pixels.shape[-3:-1]:
        return pixels
    # colours stay last in memory: more than twice as fast as colour by colour, with equal results
    colours_first = torch.from_numpy(pixels).movedim(-1, -3)
    found = tv.resize(colours_first, list(size), RESAMPLE[int(resample)], antialias=True)
    return found.movedim(-3, -1).numpy()


def whole(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    return {"pixel_values": torch.from_numpy(image)[None]}


def whole_of_any_size(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    return whole(processor, image) | {"image_sizes": torch.from_numpy(np.array([image.shape[:2]]))}


def of_image(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    """The patches of an image (H, W, 3), and its grid."""
    side = processor.image_processor.patch_size
    grid = np.array([[1, image.shape[0] // side, image.shape[1] // side]])
    return {
        "pixel_values": of_frames(processor.image_processor, image[None]),
        "image_grid_thw": torch.from_numpy(grid),
    }


def of_frames(part: Any, frames: np.ndarray, moments: int = 1) -> Tensor:
    """The patches of frames (T, H, W, 3), one per row, in the order in which a tower merges them to squares.

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


def of_video(processor: Any, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
    """The patches of a video's frames (T, H, W, 3), resized to its grid of patches, and that grid."""
    part = processor.video_processor
    size = grid[1] * part.patch_size, grid[2] * part.patch_size
    found = of_frames(part, resized(frames, size, part.resample), part.temporal_patch_size)
    return {"pixel_values_videos": found, "video_grid_thw": torch.tensor([grid])}


def of_timed_video(processor: Any, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
    """`of_video`, and the seconds that a patch spans."""
    frames_per_second = VideoMetadata(**plan.metadata).sampled_fps
    seconds = processor.video_processor.temporal_patch_size / frames_per_second
    return of_video(processor, frames, plan, grid) | {"second_per_grid_ts": torch.tensor([seconds])}


def qwen_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    return qwen2_vl.smart_resize(height, width, **_limits(processor.image_processor))


def glm_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    frames = processor.image_processor.temporal_patch_size
    return glm4v.smart_resize(frames, height, width, frames, **_limits(processor.image_processor))


def _limits(images: Any) -> dict[str, int]:
    limits = {"min_pixels": images.size["shortest_edge"], "max_pixels": images.size["longest_edge"]}
    return limits | {"factor": images.patch_size * images.merge_size}


def gemma4_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    images, pooled = processor.image_processor, processor.image_processor.pooling_kernel_size
    most = images.max_soft_tokens * pooled**2
    return get_aspect_ratio_preserving_size(height, width, images.patch_size, most, pooled)


def pixtral_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image that is scaled to fit a square and rounded up to whole image tokens."""
    longest = processor.image_processor.size["longest_edge"]
    merged = processor.patch_size * processor.spatial_merge_size
    image = np.broadcast_to(np.uint8(0), (3, height, width))  # the function only looks at the shape
    return get_resize_output_image_size(image, size=(longest, longest), patch_size=(merged, merged))


def gemma3_ids(processor: Any, height: int, width: int) -> np.ndarray:
    return np.full(processor.image_seq_length, processor.tokenizer.image_token_id)


def grid_ids(processor: Any, height: int, width: int) -> np.ndarray:
    merged = processor.image_processor.patch_size * processor.image_processor.merge_size
    return np.full((height // merged) * (width // merged), processor.image_token_id)


def pixtral_ids(processor: Any, height: int, width: int) -> np.ndarray:
    """Rows of image tokens. A break token closes each row, the end token the last one."""
    merged = processor.patch_size * processor.spatial_merge_size
    ids = np.full((height // merged, width // merged + 1), processor.image_token_id)
    ids[:, -1] = processor.image_break_token_id
    ids[-1, -1] = processor.image_end_token_id
    return ids.ravel()
