"""Qwen3-VL with a mixture of experts: Qwen3-VL but for the feed-forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_vlm.models.families import qwen3_vl
from megatron_vlm.models.family_parts import keys, llama, moe_rules, patch_towers
from megatron_vlm.models.weights import Rule


def _chosen(count: Any, text: Any) -> bool:
    return not text.num_experts or 1 <= count <= text.num_experts


SECTIONS = keys.sections(
    keys.Section(("qwen3_vl_moe",), patch_towers.TOP, no_effect=qwen3_vl.MARKERS),
    keys.Section(
        ("qwen3_vl_moe_text",),
        qwen3_vl.TEXT
        | moe_rules.TEXT
        | keys.any_of("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers")
        | {"num_experts_per_tok": keys.Values("1 to num_experts", _chosen)},
        no_effect=("sliding_window",),  # Transformers sets it and never looks at it
        rope=qwen3_vl.MROPE.keys(),
    ),
    keys.Section(("qwen3_vl_moe_vision", "qwen3_vl_moe"), qwen3_vl.VISION),
)


def architecture(hf_config: Any) -> dict:
    text = hf_config.text_config
    if not text.num_experts:
        return qwen3_vl.architecture(hf_config)
    return qwen3_vl.architecture(hf_config) | {
        "num_moe_experts": text.num_experts,
        "moe_layer_freq": [int(_has_experts(text, layer)) for layer in range(text.num_hidden_layers)],
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_aux_loss_coeff": moe_rules.balance(text),
    }


def _has_experts(text: Any, layer: int) -> bool:
    return layer not in text.mlp_only_layers and (layer + 1) % text.decoder_sparse_step == 0


def weights(hf_config: Any) -> list[Rule]:
    text, layer = hf_config.text_config, qwen3_vl.HF_MODEL + "layers.*."
    return [
        *qwen3_vl.attention_and_outer_rules(hf_config),
        *llama.mlp_rules(layer),
        *moe_rules.rules(layer, text.num_experts, text.hidden_size, text.moe_intermediate_size),
    ]


FAMILY = replace(
    qwen3_vl.FAMILY,
    model_type="qwen3_vl_moe",
    sections=SECTIONS,
    architecture=architecture,
    weights=weights,
    has_experts=True,
)
