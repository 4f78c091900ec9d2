"""Images in native resolution for SigLIP2's tower, as LFM2-VL's processor makes them: any number of patches.

That processor, as Gemma 4's, pads every image to one number of patches. Here an image has only its own:
`pixel_values` (P, F) and `image_grid_thw` (N, 3), as towers of patches have them, instead of `pixel_values`
(N, most, F), `pixel_attention_mask` (N, most) and `spatial_shapes` (N, 2); Gemma 4's has instead of the last
two `image_position_ids` (N, most, 2), the column and row of each patch and -1 for padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.data.conversation.chatml import BadSample


def is_naflex(processor: ProcessorMixin) -> bool:
    return hasattr(processor.image_processor, "encoder_patch_size")


def without_padding(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A processor's outputs, with patches and grids in place of padded images."""
    outputs = dict(outputs)
    if "spatial_shapes" in outputs:
        real_NP = outputs.pop("pixel_attention_mask").bool()
        outputs["pixel_values"] = outputs["pixel_values"][real_NP]
        outputs["image_grid_thw"] = torch.nn.functional.pad(outputs.pop("spatial_shapes"), (1, 0), value=1)
    if "image_position_ids" in outputs:
        positions = outputs.pop("image_position_ids")
        outputs["pixel_values"] = outputs["pixel_values"][positions[..., 0] >= 0]
        shapes = (positions.amax(1) + 1).flip(-1)
        outputs["image_grid_thw"] = torch.nn.functional.pad(shapes, (1, 0), value=1)
    return outputs


def resized(processor: ProcessorMixin, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image that is scaled to between the fewest and the most tokens.

    Raises BadSample for an image so long that it would have more patches than the processor pads to: this
    processor then fails, in ways of its own.
    """
    images = processor.image_processor
    new_width, new_height = images.smart_resize(
        height,
        width,
        downsample_factor=images.downsample_factor,
        min_image_tokens=images.min_image_tokens,
        max_image_tokens=images.max_image_tokens,
        encoder_patch_size=images.encoder_patch_size,
    )
    patches = (new_height // images.encoder_patch_size) * (new_width // images.encoder_patch_size)
    if patches > images.max_num_patches:
        detail = (
            f"image of {width} x {height} has {patches} patches, max_num_patches {images.max_num_patches}"
        )
        raise BadSample("processor_error", detail)
    return new_height, new_width


def count(processor: ProcessorMixin, height: int, width: int) -> tuple[int, int]:
    """The number of tokens and of patches of an image."""
    images, (height, width) = processor.image_processor, resized(processor, height, width)
    patches = (height // images.encoder_patch_size) * (width // images.encoder_patch_size)
    return patches // images.downsample_factor**2, patches


def image_ids(processor: Any, height: int, width: int) -> np.ndarray:
    images = processor.image_processor
    side = images.encoder_patch_size * images.downsample_factor
    return np.full((height // side) * (width // side), processor.image_token_id)


def patches(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    """The patches of an image (H, W, 3) in rows, each with its lines, and colours last."""
    images = processor.image_processor
    side = images.encoder_patch_size if is_naflex(processor) else images.patch_size
    rows, columns = image.shape[0] // side, image.shape[1] // side
    # a line of a patch is copied as one opaque value, not colour by colour
    lines = np.ascontiguousarray(image).reshape(-1, image.shape[1] * 3).view(f"V{3 * side}")
    cut = np.ascontiguousarray(lines.reshape(rows, side, columns).transpose(0, 2, 1))
    return {
        "pixel_values": torch.from_numpy(cut.view(np.uint8).reshape(rows * columns, -1)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
