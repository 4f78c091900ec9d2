"""Images in squares that the text names by row and column, and behind them the whole image: SmolVLM's."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.models.smolvlm.image_processing_smolvlm import get_resize_output_image_size
from transformers.video_utils import VideoMetadata

from megatron_vlm.data.image_processors.base import RESAMPLE, Grid
from megatron_vlm.data.image_processors.tiles import Tiles, tiles_of
from megatron_vlm.data.media.videos import VideoPlan

LANCZOS = 1  # Pillow's number


class Squares(Tiles):
    """To the model, squares and frames of videos are images. A sample has either images or videos."""

    marker_setting = "max_image_size"
    overview_index = -1
    known_processors = {("SmolVLMProcessor", "SmolVLMImageProcessor"): "SmolVLMVideoProcessor"}
    size_keys = ("longest_edge",)
    optional_switches = ("do_image_splitting",)
    resamples = (*RESAMPLE, LANCZOS)
    shared_settings = ("rescale_factor", "image_mean", "image_std")
    writes_by_size = True

    @property
    def size(self) -> tuple[int, int]:
        side = self.images.max_image_size["longest_edge"]
        return side, side

    def processor_counts(self, height: int, width: int) -> tuple[int, int] | None:
        rows, columns = self._squares(height, width)
        tokens = getattr(self.processor, "image_seq_len", None)  # of a square
        return tokens and (tokens * (rows * columns + 1), rows * columns + 1)

    def of_size(self, height: int, width: int) -> tuple[str, int]:
        rows, columns = self._squares(height, width)
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return text, self.count(height, width, True)[1]

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        frames = len(plan.times)
        side = self.size[0] // self.patch_size
        outputs = {"pixel_values": torch.empty(1, frames), "video_metadata": [VideoMetadata(**plan.metadata)]}
        return self.processor.replace_video_token(outputs, 0), (frames, side, side)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The squares and frames that there are: padding, which the model leaves out, is zero."""
        outputs = dict(outputs)
        outputs.pop("pixel_attention_mask", None)  # all squares have the whole size
        pixels = outputs.get("pixel_values")
        if pixels is not None and pixels.dim() == 5:
            pixels = pixels.flatten(0, 1)
            outputs["pixel_values"] = pixels[pixels.flatten(1).any(1)]
        return outputs

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        rows, columns = self._squares(*image.shape[:2])
        side = self.size[0]
        squares = []
        image = self._resized(image, self.images.size)
        if rows:
            image = self._resized(image, SizeDict(height=rows * side, width=columns * side))
            squares = [tiles_of(image, self.size)]
        overview = self._resized(image, SizeDict(height=side, width=side))
        return {"pixel_values": torch.from_numpy(np.concatenate([*squares, overview[None]]))}

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        part = self.processor.video_processor
        pixels = part.resize(torch.from_numpy(frames).movedim(-1, -3), part.size, resample=part.resample)
        return {"pixel_values": pixels.movedim(-3, -1).contiguous()}

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of an image's squares, as `SmolVLMImageProcessor` makes them; none if it is
        shown as a whole alone."""
        if not self.images.do_image_splitting:
            return 0, 0
        side = self.size[0]
        shape_only = np.broadcast_to(np.uint8(0), (3, height, width))
        height, width = get_resize_output_image_size(shape_only, self.images.size["longest_edge"])
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _resized(self, image: np.ndarray, size: SizeDict) -> np.ndarray:
        # Transformers' own step: what stands for Lanczos' filter depends on versions
        colours_first = torch.from_numpy(image).movedim(-1, 0)
        return self.images.resize(colours_first, size, resample=self.images.resample).movedim(0, -1).numpy()
