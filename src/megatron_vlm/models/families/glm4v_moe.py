"""GLM-4.5V: partial chunked M-RoPE, sigmoid router with a selection bias, shared expert, video by frames."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from megatron_vlm.models.families.base import Family
from megatron_vlm.models.families.experts import expert_rules, shared_expert_rules
from megatron_vlm.models.families.shared import decoder_architecture, decoder_rules, head_dim
from megatron_vlm.models.rotary import Rotary, inverse_frequencies
from megatron_vlm.models.weights import GroupedQKV, Rule, Whole

HF_MODEL = "model.language_model."


def architecture(hf_config: Any) -> dict:
    text = hf_config.text_config
    if not text.norm_topk_prob or text.num_experts_per_tok < 2:
        raise ValueError(
            f"text_config: norm_topk_prob {text.norm_topk_prob}, num_experts_per_tok "
            f"{text.num_experts_per_tok}: only weights normalised over at least 2 experts are supported."
        )
    return decoder_architecture(hf_config) | {
        "add_qkv_bias": text.attention_bias,
        "num_moe_experts": text.n_routed_experts,
        "moe_layer_freq": [
            int(layer >= text.first_k_dense_replace) for layer in range(text.num_hidden_layers)
        ],
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": text.moe_intermediate_size * text.n_shared_experts,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_topk_scaling_factor": text.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        **_group_limit(text),
    }


def _group_limit(text: Any) -> dict:
    """Megatron ranks groups of experts by their best topk / topk_group experts, Transformers by two."""
    if text.n_group == text.topk_group:
        return {}
    if text.num_experts_per_tok != 2 * text.topk_group:
        raise ValueError(
            f"text_config: num_experts_per_tok {text.num_experts_per_tok} is not twice topk_group "
            f"{text.topk_group}; other limits to groups of experts are not supported."
        )
    return {"moe_router_num_groups": text.n_group, "moe_router_group_topk": text.topk_group}


def rotary(hf_config: Any) -> Rotary:
    return Rotary([inverse_frequencies(hf_config.text_config)])


class Glm4vMoeVision(nn.Module):
    """The HF tower with its merger: images and videos, each frame seen as an image, to features (M, D)."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.visual = AutoModel.from_config(hf_config.vision_config, attn_implementation="sdpa")

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        return self.visual(pixel_values, grid_thw=image_grid_thw).pooler_output


def dummy_visual(hf_config: Any) -> dict[str, Tensor]:
    vision = hf_config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.zeros(side**2, width),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def weights(hf_config: Any) -> list[Rule]:
    text = hf_config.text_config
    hf_layers = HF_MODEL + "layers."
    layer, hf_layer = "language_model.decoder.layers.*.", hf_layers + "*."
    qkv = GroupedQKV(text.num_attention_heads, text.num_key_value_heads, head_dim(text))
    return [
        Rule("vision.visual.**", ("model.visual.**",), Whole()),
        *decoder_rules(hf_config, hf_model=HF_MODEL, lm_head="lm_head.weight"),
        Rule(
            layer + "self_attention.linear_qkv.bias",
            tuple(f"{hf_layer}self_attn.{part}_proj.bias" for part in "qkv"),
            qkv,
        ),
        *expert_rules(hf_layers, text.n_routed_experts, text.hidden_size, text.moe_intermediate_size),
        *shared_expert_rules(hf_layers),
        Rule(layer + "mlp.router.expert_bias", (hf_layer + "mlp.gate.e_score_correction_bias",), Whole()),
    ]


FAMILY = Family(
    model_type="glm4v_moe",
    visual_keys=("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    architecture=architecture,
    rotary=rotary,
    build_vision=Glm4vMoeVision,
    dummy_visual=dummy_visual,
    weights=weights,
    ignored_keys={"model.language_model.layers.46.**": "multi-token prediction, as Transformers ignores it"},
    groups={
        "tower": "vision.visual.",
        "projector": "vision.visual.merger.",
        "language_model": "language_model.",
    },
)
