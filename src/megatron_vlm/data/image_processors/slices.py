"""A whole image in few patches, then slices of it in more: MiniCPM-V's, whose frames of videos are cut alike.

Its processor lays the patches of all pieces side by side in `pixel_values` (1, C, side, P * side), and
`target_sizes` (N, 2) has the rows and columns of each piece. Here a piece is an item of patches.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_vlm.data.image_processors.base import Grid, resized
from megatron_vlm.data.image_processors.grid import Patches, patches_of
from megatron_vlm.data.image_processors.tiles import tiles_of
from megatron_vlm.data.media.videos import VideoPlan


class Sliced(Patches):
    """The text has the image tokens of each piece between markers, and the image's number before them."""

    marker_setting = "max_slice_nums"
    known_processors = {
        (f"{name}Processor", "MiniCPMV4_6ImageProcessor"): "MiniCPMV4_6VideoProcessor"
        for name in ("MiniCPMV4_6", "MiniCPMV4_7")
    }
    writes_by_size = True

    def processor_counts(self, height: int, width: int) -> tuple[int, int] | None:
        with suppress(AttributeError, TypeError):
            _, sizes = self._pieces(self.images, height, width)
            patches = int(sizes.prod(-1).sum())
            return patches // self._patches_of_token(self.images), patches
        return None

    def label(self, number: int, token: str) -> str:
        processor = self.processor
        has_numbers = getattr(
            processor, "use_image_id", None
        )  # None, or no field up to 5.17: as its images' says
        if not (processor.default_use_image_id if has_numbers is None else has_numbers):
            return ""
        return processor._prepend_local_ids([token * (number + 1)], [""] * (number + 1), token)[-1]

    def of_size(self, height: int, width: int) -> tuple[str, int]:
        grid, sizes = self._pieces(self.images, height, width)
        outputs = {"grids": [grid], "num_patches_per_image": [len(sizes)], "target_sizes": sizes}
        divisor = self._patches_of_token(self.images)
        text = self.processor.replace_image_token(outputs, 0, image_token_divisor=divisor)
        return text, int(sizes.prod(-1).sum())

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        part = self.processor.video_processor
        frames = len(plan.times)
        grid, sizes = self._pieces(part, plan.size[1], plan.size[0])
        outputs = {
            "num_frames_per_video": [frames],
            "grids_videos": torch.tensor([grid] * frames),
            "target_sizes_videos": torch.from_numpy(sizes).repeat(frames, 1),
        }
        divisor = self._patches_of_token(part)
        text = self.processor.replace_video_token(outputs, 0, video_token_divisor=divisor)
        return text, (frames, int(sizes.prod(-1).sum()), 1)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(outputs)
        for pixels, sizes, grids in (
            ("pixel_values", "target_sizes", "image_grid_thw"),
            ("pixel_values_videos", "target_sizes_videos", "video_grid_thw"),
        ):
            if sizes in outputs:
                outputs[grids] = pad(outputs.pop(sizes).long(), (1, 0), value=1)
                rows = outputs[pixels][0].unflatten(-1, (-1, outputs[pixels].shape[2]))
                outputs[pixels] = rows.permute(2, 0, 1, 3).flatten(1)
        return outputs

    def odd_settings(self, part: Any) -> list[str]:
        stacked = getattr(part, "stack_frames", 1)
        return super().odd_settings(part) + ([f"stack_frames = {stacked}"] if stacked != 1 else [])

    def target(self, height: int, width: int) -> tuple[int, int]:
        _, sizes = self._pieces(self.images, height, width)
        return tuple((sizes[0] * self.images.patch_size).tolist())

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        patches, sizes = self._cut(self.images, image[None])
        return {"pixel_values": patches, "image_grid_thw": _grids(sizes)}

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        patches, sizes = self._cut(self.processor.video_processor, frames)
        return {"pixel_values_videos": patches, "video_grid_thw": _grids(sizes).repeat(len(frames), 1)}

    def _cut(self, part: Any, frames: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """The patches of frames (T, H, W, 3), one after another, and the sizes of one frame's pieces."""
        side = part.patch_size
        (rows, columns), sizes = self._pieces(part, *frames.shape[1:3])
        overview_size = sizes[0] * side
        slice_size = sizes[-1] * side
        patches = []
        for frame in frames:
            pieces = [resized(frame, tuple(overview_size.tolist()), part.resample)]
            if rows:
                fine = resized(frame, tuple((slice_size * (rows, columns)).tolist()), part.resample)
                pieces += [*tiles_of(fine, tuple(slice_size.tolist()))]
            patches += [patches_of(piece[None], side, 1) for piece in pieces]
        return torch.cat(patches), sizes

    def _pieces(self, part: Any, height: int, width: int) -> tuple[list[int], np.ndarray]:
        """The rows and columns of slices, 0 if there are none, and the patches (pieces, 2) of each piece."""
        size = height, width
        resolution = part.scale_resolution
        options = {"patch_size": part.patch_size, "downsample_mode": part.downsample_mode}
        grid = part.get_sliced_grid(size, part.max_slice_nums, resolution) if part.slice_mode else None
        sizes = [part.find_best_resize(size, resolution, allow_upscale=grid is None, **options)]
        if grid is not None:
            fine = part.get_refine_size(size, grid, resolution, allow_upscale=True, **options)
            sizes += [(fine[0] // grid[0], fine[1] // grid[1])] * (grid[0] * grid[1])
        return grid or [0, 0], np.array(sizes) // part.patch_size

    def _patches_of_token(self, part: Any) -> int:
        return 4 if part.downsample_mode == "4x" else 16


def _grids(sizes_N2: np.ndarray) -> Tensor:
    return pad(torch.from_numpy(sizes_N2), (1, 0), value=1)
