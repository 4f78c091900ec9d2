"""GLM-4.1V-Thinking and GLM-4.6V-Flash: dense, norms around each sub-layer, rotary pairs of neighbours."""

from __future__ import annotations

from typing import Any

from megatron_vlm.models.families.base import Family
from megatron_vlm.models.family_parts import glm4v, keys, llama, patch_towers
from megatron_vlm.models.weights import Rule

TEXT = keys.Section(("glm4v_text",), keys.text() | {"head_dim": keys.WHOLE_HEADS}, rope=glm4v.MROPE.keys())
VISION_TYPES = ("glm4v_vision", "glm4v")


def architecture(hf_config: Any) -> dict:
    return llama.architecture(hf_config) | {
        "add_qkv_bias": True,
        "norm_after_sublayer": True,
        "rotary_interleaved": True,
    }


def weights(hf_config: Any) -> list[Rule]:
    layer = glm4v.HF_MODEL + "layers.*."
    after = {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
    return [
        glm4v.VISION_RULE,
        *llama.outer_rules(hf_config, glm4v.HF_MODEL),
        *llama.attention_rules(hf_config.text_config, layer, qkv_bias=True),
        *llama.mlp_rules(layer, fused=True),
        *llama.norm_rules(layer, after),
    ]


FAMILY = Family(
    model_type="glm4v",
    sections=glm4v.sections("glm4v", TEXT, *VISION_TYPES),
    visual_keys=patch_towers.VISUAL_KEYS,
    architecture=architecture,
    rotary=glm4v.MROPE.rotary,
    build_vision=glm4v.Glm4vVision,
    blank_image=patch_towers.blank_image,
    visual_tokens=patch_towers.visual_tokens,
    tower_pairs=patch_towers.tower_pairs,
    weights=weights,
    groups=glm4v.GROUPS,
    images_or_videos=True,
    position_ids=glm4v.position_ids,
    visual_kinds=glm4v.visual_kinds,
)
