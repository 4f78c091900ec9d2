"""Images and videos as grids of patches, in the order in which a tower merges them: Qwen's and GLM's."""

import numpy as np
import torch
from torch import Tensor
from transformers.models.glm4v import image_processing_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2_vl
from transformers.video_utils import VideoMetadata

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.data.image_processors.base import Grid, ImageProcessorSpec, resized
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
