"""What the families share whose towers take patches and grids (Qwen2.5-VL, Qwen3-VL, GLM-4.5V)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from megatron_vlm.models.rotary import Rotary, inverse_frequencies, mrope_axes

VISUAL_KEYS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


class GridVision(nn.Module):
    """The HF visual module, projector included, called once for all images and videos of a micro batch."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.visual = AutoModel.from_config(hf_config.vision_config, attn_implementation="sdpa")

    def forward(
        self,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,  # only positions need it
    ) -> Tensor:
        """Patches (P, ...) and grids (N, 3) -> features (M, D), or with deepstack (1 + n, M, D)."""
        patches_PF = _joined(pixel_values, pixel_values_videos)
        grids_N3 = _joined(image_grid_thw, video_grid_thw)
        output = self.visual(patches_PF, grid_thw=grids_N3)
        deepstack = getattr(output, "deepstack_features", None)
        return torch.stack((output.pooler_output, *deepstack)) if deepstack else output.pooler_output


def _joined(images: Tensor | None, videos: Tensor | None) -> Tensor:
    return torch.cat([part for part in (images, videos) if part is not None])


def dummy_visual(hf_config: Any) -> dict[str, Tensor]:
    """One image that is one merged patch."""
    vision = hf_config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side = vision.spatial_merge_size
    return {
        "pixel_values": torch.zeros(side**2, width),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def rotary(hf_config: Any) -> Rotary:
    """M-RoPE as the text config's `rope_parameters` say."""
    rule = hf_config.text_config.rope_parameters
    axes = mrope_axes(rule["mrope_section"], rule.get("mrope_interleaved", False))
    return Rotary([inverse_frequencies(hf_config.text_config)], axes)
