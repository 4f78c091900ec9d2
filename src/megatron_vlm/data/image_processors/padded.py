"""Images that are padded to whole image tokens, right and bottom: Kimi's, and clips of videos."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize
from transformers.video_utils import VideoMetadata

from megatron_vlm.data.image_processors.base import Frame, Grid, resized
from megatron_vlm.data.image_processors.grid import Patches, patches_of
from megatron_vlm.data.media.videos import VideoPlan


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
