"""Shared by GLM-4.1V, GLM-4.5V and GLM-4.6V: tower, placeholders, partial M-RoPE, video by frames."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.models.family_parts import keys, patch_towers
from megatron_vlm.models.positions import IMAGE, VIDEO, Kinds, mrope_positions
from megatron_vlm.models.weights import Rule, Whole

HF_MODEL = "model.language_model."
MROPE = patch_towers.MRope(sections=(8, 12, 12), part_of_head=True)
VISION_RULE = Rule("vision.visual.**", ("model.visual.**",), Whole())
GROUPS = {
    "tower": (
        *(f"vision.visual.{part}." for part in ("embeddings", "patch_embed", "blocks")),
        *(f"vision.visual.{norm}." for norm in ("post_conv_layernorm", "post_layernorm")),
    ),
    "projector": ("vision.visual.downsample.", "vision.visual.merger."),
    "language_model": ("language_model.",),
}


def sections(model_type: str, text: keys.Section, *vision_types: str) -> keys.Sections:
    """What config.json of such a family may say; `vision_types` name its vision_config."""
    top = patch_towers.TOP | keys.any_of("video_start_token_id", "video_end_token_id")
    return keys.sections(
        keys.Section((model_type,), top, no_effect=("image_start_token_id", "image_end_token_id")),
        text,
        keys.Section(vision_types, patch_towers.VISION | keys.any_of("attention_bias", "rms_norm_eps")),
    )


class Glm4vVision(patch_towers.GridVision):
    """The HF visual module; it treats every frame of a video as an image."""

    def __init__(self, hf_config: Any):
        super().__init__(hf_config)
        self.visual.embeddings.register_forward_pre_hook(_lengths_to_device)

    def forward(self, *, video_grid_thw: Tensor | None = None, **visual: Tensor) -> Tensor:
        if video_grid_thw is not None:
            video_grid_thw = torch.repeat_interleave(video_grid_thw, video_grid_thw[:, 0], dim=0)
            video_grid_thw = torch.nn.functional.pad(video_grid_thw[:, 1:], (1, 0), value=1)
        return super().forward(video_grid_thw=video_grid_thw, **visual)


def _lengths_to_device(module: nn.Module, arguments: tuple) -> tuple:
    """Moves images' lengths to the device: the position embeddings read them there, attention on the CPU."""
    hidden_states, lengths, *others = arguments
    return hidden_states, lengths.to(hidden_states.device, non_blocking=True), *others


def visual_kinds(hf_config: Any) -> Kinds:
    """A placeholder belongs to a video frame if a begin-of-video token before it is not yet closed."""
    return partial(
        _kinds,
        image=hf_config.image_token_id,
        begin=hf_config.video_start_token_id,
        end=hf_config.video_end_token_id,
    )


def _kinds(input_ids: Any, image: int, begin: int, end: int) -> Any:
    opened = (input_ids == begin).cumsum(-1) > (input_ids == end).cumsum(-1)
    return (input_ids == image) * (IMAGE + (VIDEO - IMAGE) * opened)


def position_ids(hf_config: Any) -> partial:
    merge_size = hf_config.vision_config.spatial_merge_size
    return partial(mrope_positions, kinds=visual_kinds(hf_config), merge_size=merge_size)
