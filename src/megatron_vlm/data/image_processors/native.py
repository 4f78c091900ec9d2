"""Images in native resolution, each with its own number of patches: LFM2-VL's (SigLIP2 NaFlex) and Gemma 4's.

Their processors pad every image to one number of patches. Here an image has only its own: `pixel_values`
(P, F) and `image_grid_thw` (N, 3), as towers of patches have them, instead of `pixel_values` (N, most, F) and
either `pixel_attention_mask` (N, most) with `spatial_shapes` (N, 2), which is LFM2-VL's way, or Gemma 4's
`image_position_ids` (N, most, 2): the column and row of each patch, and -1 for padding.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.grid import Patches


class Native(Patches):
    """Patches in rows, each with its lines, and colours last."""

    colours_last = True


class NaFlex(Native):
    """The images of LFM2-VL, whose processor counts none, if they are not cut into tiles."""

    marker_setting = "encoder_patch_size"
    known_processors = {("Lfm2VlProcessor", "Lfm2VlImageProcessor"): None}
    splits = "do_image_splitting"

    @property
    def patch_size(self) -> int:
        return self.images.encoder_patch_size

    def target(self, height: int, width: int) -> tuple[int, int]:
        """The size of an image that is scaled to between the fewest and the most tokens.

        Raises BadSample for an image so long that it would have more patches than the processor pads to: this
        processor then fails, in ways of its own.
        """
        images, side = self.images, self.patch_size
        new_width, new_height = images.smart_resize(
            height,
            width,
            downsample_factor=images.downsample_factor,
            min_image_tokens=images.min_image_tokens,
            max_image_tokens=images.max_image_tokens,
            encoder_patch_size=side,
        )
        if (patches := (new_height // side) * (new_width // side)) > images.max_num_patches:
            limit = f"max_num_patches {images.max_num_patches}"
            raise BadSample("processor_error", f"image of {width} x {height} has {patches} patches, {limit}")
        return new_height, new_width

    def processor_counts(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.target(height, width)
        patches = (height // self.patch_size) * (width // self.patch_size)
        return patches // self.images.downsample_factor**2, patches

    def check_settings(self) -> None:
        refuse_narrow(self.images.min_image_tokens, self.images.max_image_tokens)

    def refuse(self, height: int, width: int, alone: bool) -> None:
        self.target(height, width)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(outputs)
        if "spatial_shapes" in outputs:
            real_NP = outputs.pop("pixel_attention_mask").bool()
            outputs["pixel_values"] = outputs["pixel_values"][real_NP]
            outputs["image_grid_thw"] = pad(outputs.pop("spatial_shapes"), (1, 0), value=1)
        return outputs


class Pooled(Native):
    """The images of Gemma 4 in about their aspect ratio: squares of patches are pooled to a token."""

    marker_setting = "pooling_kernel_size"
    known_processors = {("Gemma4Processor", "Gemma4ImageProcessor"): None}
    switches = ("do_resize", "do_rescale")  # the tower does the rest

    def target(self, height: int, width: int) -> tuple[int, int]:
        pooled = self.images.pooling_kernel_size
        max_patches = self.images.max_soft_tokens * pooled**2
        return get_aspect_ratio_preserving_size(height, width, self.images.patch_size, max_patches, pooled)

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        tokens, _ = self.processor_counts(height, width)
        pixels = tokens * (self.images.patch_size * self.images.pooling_kernel_size) ** 2
        return tokens, pixels // self.patch_size**2

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(outputs)
        if "image_position_ids" in outputs:
            positions = outputs.pop("image_position_ids")
            outputs["pixel_values"] = outputs["pixel_values"][positions[..., 0] >= 0]
            outputs["image_grid_thw"] = pad((positions.amax(1) + 1).flip(-1), (1, 0), value=1)
        return outputs


class Joined(Pooled):
    """The images of Gemma 4 12B: the patches of a square are one patch already, and each becomes a token."""

    known_processors = {("Gemma4UnifiedProcessor", "Gemma4UnifiedImageProcessor"): None}

    @property
    def patch_size(self) -> int:
        return self.images.patch_size * self.images.pooling_kernel_size


def refuse_narrow(min_tokens: int, max_tokens: int) -> None:
    """Refuse limits of an image's tokens that are too close to each other.

    Raises ConfigError if images up to 1:3, scaled up to the fewest tokens, can have more than the most:
    Transformers fails on these.
    """
    if (needed := most_when_scaled_up(min_tokens)) > max_tokens:
        raise ConfigError(
            f"image processor: with min_image_tokens {min_tokens} a small image, scaled up, has up to "
            f"{needed} tokens, and max_image_tokens is {max_tokens}: such images would be lost; raise "
            f"max_image_tokens to {needed}, or lower min_image_tokens."
        )


def most_when_scaled_up(min_tokens: int, aspect: int = 3) -> int:
    """The most tokens of an image up to 1:`aspect` that LFM2-VL's processor scales up to `least`: it rounds
    both sides up to whole tokens."""
    shortest, longest = math.ceil(math.sqrt(min_tokens)), math.ceil(math.sqrt(aspect * min_tokens))
    # just over n - 1 tokens wide become n
    return max(
        n * math.ceil(min_tokens / max(n - 1, math.sqrt(min_tokens))) for n in range(shortest, longest + 1)
    )
