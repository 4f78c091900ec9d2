"""Images and frames as the processors of LLaVA, InternVL and LLaVA-OneVision cut them: to a square, or into
tiles beside the whole image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_transforms import get_resize_output_image_size
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from megatron_vlm.data.conversation.chatml import BadSample
from megatron_vlm.data.media.anyres import is_anyres
from megatron_vlm.data.media.images import MAX_DECODED_PIXELS
from megatron_vlm.data.media.patches import resized

LAST = "channels_last"
MOST_OF_SQUARE = 4 * MAX_DECODED_PIXELS  # 960 MB; an image of 1:200 would take 200 times its own memory


def size_before_crop(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image whose shorter side is scaled to what CLIP's processor crops."""
    size, image = processor.image_processor.size["shortest_edge"], np.broadcast_to(0, (height, width, 3))
    return get_resize_output_image_size(image, size, default_to_square=False, input_data_format=LAST)


def cropped(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    """The middle of an image (H, W, 3), with black around it where the image is smaller."""
    images = processor.image_processor
    middle = images.center_crop(torch.from_numpy(image).movedim(-1, 0), images.crop_size)
    return {"pixel_values": middle.movedim(0, -1).contiguous()[None]}


def fit(size: Mapping[str, int], canvases: list[list[int]]) -> bool:
    """Whether canvases are cut into whole tiles that are squares."""
    side = size["height"]
    return side == size["width"] and all(length % side == 0 for canvas in canvases for length in canvas)


def internvl(processor: Any, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
    """The tiles of an image; behind several the image as a whole."""
    images = processor.image_processor
    tile = images.size["height"], images.size["width"]
    columns, rows = get_optimal_tiled_canvas(image.shape[:2], tile, images.min_patches, images.max_patches)
    canvas = resized(image, (rows * tile[0], columns * tile[1]), images.resample)
    tiles = _cut(canvas, tile)
    if len(tiles) > 1:
        tiles = np.concatenate([tiles, resized(image, tile, images.resample)[None]])
    return {"pixel_values": torch.from_numpy(tiles)}


def onevision(processor: Any, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
    """The image as a whole and then its tiles if it is its conversation's only one; else it is one tile."""
    images, size = processor.image_processor, image.shape[:2]
    tile = images.size["height"], images.size["width"]
    if alone:
        canvas = select_best_resolution(size, images.image_grid_pinpoints)
        inside = resized(image, get_patch_output_size(image, canvas, LAST), images.resample)
        whole, tiles = image, [_cut(_centred(inside, canvas, 0), tile)]
    else:
        square, colour = square_of(*size), [int(255 * mean) for mean in images.image_mean]
        whole, tiles = _centred(image, square, colour), []
    pixels = np.concatenate([resized(whole, tile, images.resample)[None], *tiles])
    return {
        "pixel_values": torch.from_numpy(pixels),
        "image_sizes": torch.tensor([size]),
        "image_tiles": torch.tensor([len(pixels)]),
    }


def square_of(height: int, width: int) -> tuple[int, int]:
    """The square to which LLaVA-OneVision's processor pads an image among others. Raises BadSample if it is
    too large."""
    side = max(height, width)
    if side**2 > MOST_OF_SQUARE:
        raise BadSample("image_too_large", f"{width}x{height} is padded to a square by its processor")
    return side, side


def frames_as_images(processor: Any, frames: np.ndarray, *_: Any) -> dict[str, Tensor]:
    """Frames (T, H, W, 3), each as a tile."""
    part = processor.video_processor
    size = part.size["height"], part.size["width"]
    return {"pixel_values": torch.from_numpy(resized(frames, size, part.resample))}


def frames_of_video(processor: Any, frames: np.ndarray, *_: Any) -> dict[str, Tensor]:
    """Frames (T, H, W, 3), each as a tile, and how many they are."""
    found = frames_as_images(processor, frames)["pixel_values"]
    return {"pixel_values_videos": found, "video_frames": torch.tensor([len(found)])}


def video_text(processor: Any, frames: int) -> str:
    """What InternVL's or LLaVA-OneVision's processor writes for a video, in its call alone up to 5.12."""
    if is_anyres(processor):  # squares of two by two features are pooled; one feature ends the video
        side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        return processor.video_token * (frames * side**2 + 1)
    shown = processor.image_token * processor.image_seq_length
    frame = f"{processor.start_image_token}{shown}{processor.end_image_token}"
    return "\n".join(f"Frame{number}: {frame}" for number in range(1, frames + 1))


def _cut(image: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """(tiles, height, width, 3), row after row."""
    rows, columns = image.shape[0] // tile[0], image.shape[1] // tile[1]
    # a line of a tile is copied at once, not colour by colour
    lines = image.reshape(rows, tile[0], columns, 3 * tile[1]).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(lines).reshape(-1, *tile, 3)


def _centred(image: np.ndarray, size: tuple[int, int], colour: Any) -> np.ndarray:
    """An image in the middle of a canvas of `size`, a half pixel to the top left if it must be."""
    canvas = np.empty((*size, 3), np.uint8)
    canvas[:] = colour
    height, width, _ = image.shape
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas[top : top + height, left : left + width] = image
    return canvas
