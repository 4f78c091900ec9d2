"""Qwen2.5-VL: window-attention tower, qkv bias, M-RoPE in chunks with the seconds of videos."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_vlm.models.families.base import Family
from megatron_vlm.models.family_parts import keys, llama, patch_towers
from megatron_vlm.models.positions import kinds_by_token, mrope_positions
from megatron_vlm.models.weights import Rule, Whole

MROPE = patch_towers.MRope(sections=(16, 24, 24))


def _whole_heads(head_dim: Any, text: Any) -> bool:
    """Whether attention has this `head_dim`: in Transformers the rotary embedding reads it, attention not."""
    return head_dim in (None, text.hidden_size // text.num_attention_heads)


SECTIONS = keys.sections(
    keys.Section(
        ("qwen2_5_vl",), patch_towers.TOP, no_effect=("vision_start_token_id", "vision_end_token_id")
    ),
    keys.Section(
        ("qwen2_5_vl_text",),
        keys.text()
        | keys.any_of("use_sliding_window", "sliding_window", "max_window_layers")
        | {"head_dim": keys.Values("hidden_size / num_attention_heads", _whole_heads)}
        | {"layer_types": keys.LAYER_TYPES},
        rope=MROPE.keys(),
    ),
    keys.Section(
        ("qwen2_5_vl_vision", "qwen2_5_vl"),
        patch_towers.VISION | keys.any_of("tokens_per_second", "window_size", "fullatt_block_indexes"),
    ),
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
    sections=SECTIONS,
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
