"""Qwen2.5-VL: window-attention tower, qkv bias, M-RoPE in chunks with the seconds of videos."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_vlm.models.families import grids, llama
from megatron_vlm.models.families.base import Family
from megatron_vlm.models.positions import kinds_by_token, mrope_positions
from megatron_vlm.models.weights import Rule, Whole


def architecture(hf_config: Any) -> dict:
    return llama.architecture(hf_config) | {"add_qkv_bias": True}


def position_ids(hf_config: Any) -> partial:
    vision = hf_config.vision_config
    return partial(
        mrope_positions,
        kinds=kinds_by_token(hf_config),
        merge_size=vision.spatial_merge_size,
        tokens_per_second=vision.tokens_per_second,
    )


def weights(hf_config: Any) -> list[Rule]:
    return [
        Rule("vision.visual.**", ("visual.**",), Whole()),
        *llama.outer_rules(hf_config, "model."),
        *llama.attention_rules(hf_config.text_config, "model.layers.*.", qkv_bias=True),
        *llama.mlp_rules("model.layers.*."),
    ]


FAMILY = Family(
    model_type="qwen2_5_vl",
    visual_keys=(*grids.VISUAL_KEYS, "second_per_grid_ts"),
    architecture=architecture,
    rotary=grids.rotary,
    build_vision=grids.GridVision,
    blank_image=grids.blank_image,
    visual_tokens=grids.visual_tokens,
    weights=weights,
    renames=((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    groups={
        "tower": ("vision.visual.patch_embed.", "vision.visual.blocks."),
        "projector": ("vision.visual.merger.",),
        "language_model": ("language_model.",),
    },
    position_ids=position_ids,
)
