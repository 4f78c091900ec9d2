"""Qwen3-VL: q/k norm, deepstack, interleaved M-RoPE, videos with the time in their text."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_vlm.models.families.base import Family
from megatron_vlm.models.family_parts import keys, llama, patch_towers
from megatron_vlm.models.positions import kinds_by_token, mrope_positions
from megatron_vlm.models.weights import Rule, Whole

HF_MODEL = "model.language_model."
GROUPS = {
    "tower": ("vision.visual.patch_embed.", "vision.visual.pos_embed.", "vision.visual.blocks."),
    "projector": ("vision.visual.merger.", "vision.visual.deepstack_merger_list."),
    "language_model": ("language_model.",),
}
MROPE = patch_towers.MRope(sections=(24, 20, 20), interleaved=True)
TEXT = keys.text() | keys.any_of("attention_bias")
VISION = patch_towers.VISION | keys.any_of("num_position_embeddings", "deepstack_visual_indexes")
MARKERS = ("vision_start_token_id", "vision_end_token_id")  # only the processor needs them
SECTIONS = keys.sections(
    keys.Section(("qwen3_vl",), patch_towers.TOP, no_effect=MARKERS),
    keys.Section(("qwen3_vl_text",), TEXT, rope=MROPE.keys()),
    keys.Section(("qwen3_vl_vision", "qwen3_vl"), VISION),
)


def architecture(hf_config: Any) -> dict:
    return llama.architecture(hf_config) | {
        "qk_layernorm": True,
        **llama.attention_bias(hf_config.text_config),
        "deepstack_layers": patch_towers.deepstack_features(hf_config),
    }


def position_ids(hf_config: Any) -> partial:
    merge_size = hf_config.vision_config.spatial_merge_size
    return partial(mrope_positions, kinds=kinds_by_token(hf_config), merge_size=merge_size)


def weights(hf_config: Any) -> list[Rule]:
    return [*attention_and_outer_rules(hf_config), *llama.mlp_rules(HF_MODEL + "layers.*.")]


def attention_and_outer_rules(hf_config: Any) -> list[Rule]:
    """Rules for everything but the feed-forwards."""
    text = hf_config.text_config
    return [
        Rule("vision.visual.**", ("model.visual.**",), Whole()),
        *llama.outer_rules(hf_config, HF_MODEL),
        *llama.attention_rules(
            text, HF_MODEL + "layers.*.", text.attention_bias, text.attention_bias, qk_norm=True
        ),
    ]


FAMILY = Family(
    model_type="qwen3_vl",
    sections=SECTIONS,
    visual_keys=patch_towers.VISUAL_KEYS,
    architecture=architecture,
    rotary=MROPE.rotary,
    build_vision=patch_towers.GridVision,
    blank_image=patch_towers.blank_image,
    visual_tokens=patch_towers.visual_tokens,
    tower_pairs=patch_towers.tower_pairs,
    weights=weights,
    groups=GROUPS,
    position_ids=position_ids,
)
