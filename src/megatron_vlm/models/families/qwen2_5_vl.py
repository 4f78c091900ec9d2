"""Qwen2.5-VL: window-attention tower, qkv bias, M-RoPE in chunks with the seconds of videos."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_vlm.models.families.base import Family
from megatron_vlm.models.family_parts import keys, llama, patch_towers
from megatron_vlm.models.positions import kinds_by_token, mrope_positions
from megatron_vlm.models.weights import Rule, Whole

MROPE = patch_towers.MRope(sections=(16, 24, 24))


def sections(model_type: str, *vision_keys: str) -> keys.Sections:
    """Of a family with this text model; its tower has these keys besides those of all."""
    text = keys.text() | {"head_dim": keys.WHOLE_HEADS, "layer_types": keys.LAYER_TYPES}
    text |= keys.any_of("use_sliding_window", "sliding_window", "max_window_layers")
    no_effect = ("vision_start_token_id", "vision_end_token_id")
    vision = patch_towers.VISION | keys.any_of(*vision_keys)
    return keys.sections(
        keys.Section((model_type,), patch_towers.TOP, no_effect=no_effect),
        keys.Section((f"{model_type}_text",), text, rope=MROPE.keys()),
        keys.Section((f"{model_type}_vision", model_type), vision),
    )


def architecture(hf_config: Any) -> dict:
    windows = llama.layer_windows(hf_config.text_config)
    return llama.architecture(hf_config) | {"add_qkv_bias": True, "layer_windows": windows}


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
    sections=sections("qwen2_5_vl", "tokens_per_second", "window_size", "fullatt_block_indexes"),
    visual_keys=(*patch_towers.VISUAL_KEYS, "second_per_grid_ts"),
    architecture=architecture,
    rotary=MROPE.rotary,
    build_vision=patch_towers.GridVision,
    blank_image=patch_towers.blank_image,
    visual_tokens=patch_towers.visual_tokens,
    tower_pairs=patch_towers.tower_pairs,
    weights=weights,
    renames=((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    groups={
        "tower": ("vision.visual.patch_embed.", "vision.visual.blocks."),
        "projector": ("vision.visual.merger.",),
        "language_model": ("language_model.",),
    },
    position_ids=position_ids,
)
