"""What the families share whose towers take patches and grids (Qwen2.5-VL, Qwen3-VL, GLM-4.5V)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, vision_utils

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.rotary import Rotary, inverse_frequencies, mrope_axes

VISUAL_KEYS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


class GridVision(nn.Module):
    """The HF visual module, projector included, called once for all images and videos of a micro batch."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.visual = AutoModel.from_config(
            hf_config.vision_config, attn_implementation="sdpa", trust_remote_code=False
        )

    def forward(
        self,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,  # only positions need it
    ) -> Tensor:
        """Patches (P, ...) and grids (N, 3) on CPU -> features (M, D), or with deepstack (1 + n, M, D)."""
        patches_PF = _joined(pixel_values, pixel_values_videos)
        grids_N3 = _joined(image_grid_thw, video_grid_thw).cpu()
        plan = self._plan(grids_N3, patches_PF.device)
        output = self.visual(patches_PF, grid_thw=grids_N3.to(patches_PF.device, non_blocking=True), **plan)
        deepstack = getattr(output, "deepstack_features", None)
        return torch.stack((output.pooler_output, *deepstack)) if deepstack else output.pooler_output

    def _plan(self, grids_N3: Tensor, device: torch.device) -> dict[str, Tensor]:
        """What the tower derives from the grids, by the names under which it takes it.

        Computed on CPU, where the tower would wait for the device, and once more in every layer for
        sequence lengths: these stay on CPU, the rest goes to `device`.
        """
        visual = self.visual
        lengths = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_N3)}
        indices = {"position_ids": vision_utils.get_vision_position_ids(grids_N3, visual.spatial_merge_size)}
        if hasattr(visual, "window_size"):
            indices["window_index"], lengths["cu_window_seqlens"] = vision_utils.get_vision_window_index(
                grids_N3, visual.spatial_merge_size, visual.window_size, visual.patch_size
            )
        if hasattr(visual, "interpolation_mode"):  # transformers >= 5.17; before, the tower does it itself
            interpolation = vision_utils.get_vision_interpolation_indices_and_weights(
                grids_N3,
                visual.num_grid_per_side,
                visual.interpolation_mode,
                visual.interpolation_align_corners,
                visual.spatial_merge_size,
            )
            indices["interp_indices"], indices["interp_weights"] = interpolation
        return lengths | {name: t.to(device, non_blocking=True) for name, t in indices.items()}


def _joined(images: Tensor | None, videos: Tensor | None) -> Tensor:
    return torch.cat([part for part in (images, videos) if part is not None])


def blank_image(hf_config: Any, pixels: int) -> dict[str, Tensor]:
    """A square of whole merged patches."""
    vision = hf_config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merged = vision.patch_size * vision.spatial_merge_size
    side = vision.spatial_merge_size * max(1, round(pixels**0.5 / merged))
    return {
        "pixel_values": torch.zeros(side**2, width),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def visual_tokens(hf_config: Any, visual: GenericVisualInputs) -> list[int]:
    """Merged patches."""
    grids_N3 = _joined(visual.image_grid_thw, visual.video_grid_thw)
    return (grids_N3.prod(-1) // hf_config.vision_config.spatial_merge_size**2).tolist()


def rotary(hf_config: Any) -> Rotary:
    """M-RoPE as the text config's `rope_parameters` say."""
    rule = hf_config.text_config.rope_parameters
    axes = mrope_axes(rule["mrope_section"], rule.get("mrope_interleaved", False))
    return Rotary([inverse_frequencies(hf_config.text_config)], axes)
