"""MiniCPM-V 4.7: 4.6 with M-RoPE, in which the whole image and its slices lie on one canvas."""

from typing import Any

from torch import Tensor
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import (
    MiniCPMV4_7Merger,
    MiniCPMV4_7Model,
    MiniCPMV4_7VisionModel,
)

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families import minicpmv4_6
from megatron_vlm.models.family_parts import limits
from megatron_vlm.models.layers.fused import Rotary

MARKERS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


class Canvas:
    """Transformers' own positions, whose functions need of a model its config alone."""

    get_rope_index = MiniCPMV4_7Model.get_rope_index
    get_vision_position_ids = MiniCPMV4_7Model.get_vision_position_ids
    _group_visual_frames = MiniCPMV4_7Model._group_visual_frames
    _frame_end_idx = staticmethod(MiniCPMV4_7Model._frame_end_idx)

    def __init__(self, config: Any):
        self.config = config


class MiniCPMV47(minicpmv4_6.MiniCPMV46):
    model_type = "minicpmv4_7"
    top_limits = minicpmv4_6.MiniCPMV46.top_limits | dict.fromkeys(MARKERS, limits.TOKEN)
    parts = (MiniCPMV4_7VisionModel, MiniCPMV4_7Merger)

    def rotary(self) -> Rotary:
        return self.mrope.rotary(self.text)

    def position_ids(self, input_ids_T: Tensor, visual: GenericVisualInputs | None) -> Tensor:
        sizes = {}
        if visual is not None:
            grids = {"target_sizes": visual.image_grid_thw, "target_sizes_videos": visual.video_grid_thw}
            sizes = {name: grid[:, 1:] for name, grid in grids.items() if grid is not None}
        kinds_T = self.visual_kinds(input_ids_T)
        try:
            positions, _ = Canvas(self.hf_config).get_rope_index(input_ids_T[None], kinds_T[None], **sizes)
        except (RuntimeError, StopIteration) as error:
            raise ValueError("markers of slices do not stand as the processor sets them.") from error
        return positions[:, 0]
