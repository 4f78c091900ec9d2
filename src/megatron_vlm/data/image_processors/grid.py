"""Images and videos as patches in grids: Qwen's, GLM's, LFM2-VL's (SigLIP2 NaFlex), Gemma 4's and Kimi's.

The processors of LFM2-VL and Gemma 4 pad every image to one number of patches. Here an image has only its
own: `pixel_values` (P, F) and `image_grid_thw` (N, 3), as towers of patches have them, instead of
`pixel_values` (N, most, F) and either `pixel_attention_mask` (N, most) with `spatial_shapes` (N, 2), which is
LFM2-VL's way, or Gemma 4's `image_position_ids` (N, most, 2): the column and row of each patch, and -1 for
padding.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.glm4v import image_processing_glm4v as glm4v
from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2_vl
from transformers.video_utils import VideoMetadata

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.base import Frame, Grid, ImageProcessorSpec, resized
from megatron_vlm.data.media.videos import VideoPlan, outputs_of_plan


class Patches(ImageProcessorSpec):
    """A spec whose pixels are patches (P, F); grids (N, 3) say how many each item has."""

    @property
    def merge(self) -> int:
        """Patches along the side of a square that the tower merges."""
        return getattr(self.images, "merge_size", 1)

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        pixels, side = self.fit(image), self.patch_size
        grid = [1, pixels.shape[0] // side, pixels.shape[1] // side]
        patches = patches_of(pixels[None], side, self.merge)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}

    def patches_of(self, visual: GenericVisualInputs) -> int:
        grids = (visual.image_grid_thw, visual.video_grid_thw)
        return sum(int(grid.prod(-1).sum()) for grid in grids if grid is not None)

    def frames(self, item: GenericVisualInputs) -> Tensor:
        patches_PF, grid = item.pixel_values, item.image_grid_thw
        if patches_PF is None:
            patches_PF, grid = item.pixel_values_videos, item.video_grid_thw
        if is_raw(patches_PF) or self.colours_last:
            patches_PF = patches_PF.unflatten(-1, (-1, 3)).transpose(1, 2).flatten(1)
        [(times, rows, columns)] = grid.tolist()
        merge, side = self.merge, self.patch_size
        folded = patches_PF.view(times, rows // merge, columns // merge, merge, merge, 3, -1, side, side)
        frames_TCHW = folded.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, 3, rows * side, columns * side)
        # an image is repeated over the moments that the tower joins
        return frames_TCHW if item.pixel_values is None else frames_TCHW[:1]


class QwenGrid(Patches):
    """The images and videos of Qwen2-VL and later."""

    marker_setting = "merge_size"
    known_processors = {
        ("Qwen2VLProcessor", "Qwen2VLImageProcessor"): "Qwen2VLVideoProcessor",
        ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"): "Qwen2VLVideoProcessor",
        ("Qwen3VLProcessor", "Qwen2VLImageProcessor"): "Qwen3VLVideoProcessor",
    }
    size_keys = ("shortest_edge", "longest_edge")

    def target(self, height: int, width: int) -> tuple[int, int]:
        return qwen2_vl.smart_resize(height, width, **self.limits)

    @property
    def limits(self) -> dict[str, int]:
        min_pixels, max_pixels = self.images.size["shortest_edge"], self.images.size["longest_edge"]
        multiple = self.patch_size * self.images.merge_size * getattr(self.images, "patch_expand_factor", 1)
        return {"factor": multiple, "min_pixels": min_pixels, "max_pixels": max_pixels}

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        # the processor's own count takes 0.5 ms, and GLM-GA's leaves out what multiplies its patches
        height, width = self.target(height, width)
        patches = (height // self.patch_size) * (width // self.patch_size)
        return patches // self.images.merge_size**2, patches

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        outputs = outputs_of_plan(self.processor.video_processor, plan)
        return self.processor.replace_video_token(outputs, 0), tuple(outputs["video_grid_thw"][0].tolist())

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        part = self.processor.video_processor
        pixels = resized(frames, (grid[1] * part.patch_size, grid[2] * part.patch_size), part.resample)
        patches = patches_of(pixels, part.patch_size, part.merge_size, part.temporal_patch_size)
        tensors = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
        if "second_per_grid_ts" in self.processor.model_input_names:  # the seconds that a patch spans
            frames_per_second = VideoMetadata(**plan.metadata).sampled_fps
            tensors["second_per_grid_ts"] = torch.tensor([part.temporal_patch_size / frames_per_second])
        return tensors


class GLMGrid(QwenGrid):
    """The images and videos of GLM-4.1V and later: the limits hold for all moments of a patch together."""

    known_processors = {
        ("Glm4vProcessor", "Glm4vImageProcessor"): "Glm4vVideoProcessor",
        ("Glm46VProcessor", "Glm46VImageProcessor"): "Glm46VVideoProcessor",
        ("Glm46VProcessor", "GlmgaImageProcessor"): "GlmgaVideoProcessor",
    }

    def target(self, height: int, width: int) -> tuple[int, int]:
        moments = self.images.temporal_patch_size
        return glm4v.smart_resize(moments, height, width, moments, **self.limits)


def patches_of(frames: np.ndarray, side: int, merge: int, moments: int = 1) -> Tensor:
    """The patches of frames (T, H, W, 3), one per row, in the order in which a tower merges them to squares.

    A patch has `side` lines of `side` pixels and spans `moments` frames; a square is `merge` patches wide.
    """
    times, height, width, _ = frames.shape
    # a line of a patch is copied as one opaque value, not colour by colour
    lines = np.ascontiguousarray(frames).reshape(times, height, width * 3).view(f"V{3 * side}")
    across = width // side // merge
    cut = lines.reshape(times // moments, moments, height // side // merge, merge, side, across, merge)
    # The tower merges squares of merge x merge patches, so the patches of a square follow one another: time,
    # row and column of the square, row and column of the patch in it, then its moments and lines.
    merged = np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 1, 4))
    return torch.from_numpy(merged.view(np.uint8).reshape(-1, moments * side * side * 3))


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


class Padded(Patches):
    """Patches in rows. A video is clips of a few frames, each with a grid and the tokens of one frame."""

    marker_setting = "max_patches"
    known_processors = {("Kimi_K25Processor", "Kimi_K25ImageProcessor"): "Kimi_K25VideoProcessor"}
    size_keys = ("max_height", "max_width")
    merge = 1  # of patches that follow one another

    def target(self, height: int, width: int) -> tuple[int, int]:
        return _sizes(self.images, height, width)[0]

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        height, width = _sizes(self.images, height, width)[1]
        patches = (height // self.patch_size) * (width // self.patch_size)
        return patches // self.images.merge_size**2, patches

    def processor_counts(self, height: int, width: int) -> tuple[int, int]:
        return self.count(height, width, True)

    def frame(self, width: int, height: int, alone: bool) -> Frame:
        size, padded = _sizes(self.images, height, width)
        return Frame(padded[1], padded[0], 0, 0, size[1], size[0])

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        grids = self._grids(plan)
        outputs = {
            "num_chunks_per_video": [len(grids)],
            "video_grid_thw": grids,
            "video_metadata": [VideoMetadata(**plan.metadata)],
        }
        _, rows, columns = grids[0].tolist()
        return self.processor.replace_video_token(outputs, 0), (len(plan.times), rows, columns)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The patches as rows (P, F)."""
        outputs = dict(outputs)
        outputs.pop("num_chunks_per_video", None)
        for name in ("pixel_values", "pixel_values_videos"):
            if name in outputs:
                outputs[name] = outputs[name].flatten(1)
        return outputs

    def fit(self, image: np.ndarray) -> np.ndarray:
        return _padded(self.images, image)

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        part = self.processor.video_processor
        patches = patches_of(_padded(part, frames), part.patch_size, 1)
        return {"pixel_values_videos": patches, "video_grid_thw": self._grids(plan)}

    def _grids(self, plan: VideoPlan) -> Tensor:
        """(clips, 3): the frames, rows and columns of each clip of a video."""
        part = self.processor.video_processor
        width, height = plan.size
        _, (height, width) = _sizes(part, height, width)
        times = [len(clip) for clip in torch.arange(len(plan.times)).split(part.temporal_patch_size)]
        side = part.patch_size
        return torch.tensor([[time, height // side, width // side] for time in times])


def _sizes(part: Any, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size to which the image or video processor resizes, and the size to which it then pads."""
    return navit_resize(
        height, width, part.patch_size, part.merge_size, part.max_patches, part.size["max_height"]
    )


def _padded(part: Any, pixels: np.ndarray) -> np.ndarray:
    """An image or frames, (..., H, W, 3), resized, with black at the right and bottom."""
    size, padded = _sizes(part, *pixels.shape[-3:-1])
    missing = [(0, padded_length - length) for padded_length, length in zip(padded, size, strict=True)]
    outside = [(0, 0)] * (pixels.ndim - 3)
    return np.pad(resized(pixels, size, part.resample), [*outside, *missing, (0, 0)])
