"""The text models of DeepSeek-V3 and Mistral Small 4: latent attention, its limits and rules for weights."""

import math
from typing import Any

from megatron_vlm.models.family_parts import limits, moe_rules
from megatron_vlm.models.family_parts.llama import LlamaFamily
from megatron_vlm.models.layers.attention_sizes import LatentHeads
from megatron_vlm.models.weights.rules import Cut, Operation, Rule, Whole

OURS = "self_attention."
THEIRS = "self_attn."


def scores_of(text: Any) -> int:
    """The channels of a query and of a key."""
    return text.qk_nope_head_dim + text.qk_rope_head_dim


def _is_turned_part(factor: Any, rule_and_text: tuple[dict, Any]) -> bool:
    text = rule_and_text[1]
    return factor is not None and int(text.head_dim * factor) == text.qk_rope_head_dim


SCORES = limits.Limit("qk_nope_head_dim + qk_rope_head_dim", lambda width, text: width == scores_of(text))
LIMITS = {
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), limits.SIZE),
    "q_lora_rank": limits.SIZE_OR_NULL,
    "qk_rope_head_dim": limits.EVEN,
    "qk_head_dim": SCORES,
    "num_key_value_heads": limits.Limit(
        "num_attention_heads", lambda groups, text: groups == text.num_attention_heads
    ),
}
DEEPSEEK_V3 = {
    **LIMITS,
    **moe_rules.DEEPSEEK,
    **moe_rules.SIGMOID,
    "head_dim": limits.Limit("qk_rope_head_dim", lambda width, text: width == text.qk_rope_head_dim),
    # without it, Transformers takes queries of the text for some of the tower when it reads a Kimi
    "q_lora_rank": limits.Limit("above 0", lambda rank, text: bool(rank) and rank > 0),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), limits.UNUSED),
}
MISTRAL4 = {
    **LIMITS,
    **moe_rules.DEEPSEEK,
    "head_dim": SCORES,
    # a group is ranked by what softmax gives, in Megatron by what comes before
    "n_group": limits.Limit("topk_group", lambda count, text: 0 < count == text.topk_group),
}
ROPE = limits.not_null("factor", "linear", "llama3", "yarn")
MISTRAL4_ROPE = ROPE | {
    "rope_type": limits.only("yarn"),  # in Transformers the default one turns whole heads
    "partial_rotary_factor": limits.Limit("qk_rope_head_dim / head_dim", _is_turned_part),
}


def architecture(text: Any) -> dict:
    """Fields of LanguageModelConfig that latent attention adds to or changes in `llama.architecture`."""
    heads = LatentHeads(
        query_rank=text.q_lora_rank,
        rank=text.kv_lora_rank,
        plain=text.qk_nope_head_dim,
        turned=text.qk_rope_head_dim,
        value=text.v_head_dim,
    )
    return {
        "latent_heads": heads,
        "kv_channels": heads.channels,
        "num_query_groups": text.num_attention_heads,
        "softmax_scale": heads.scores**-0.5 * _yarn_factor(text.rope_parameters),
        "rotary_interleaved": bool(text.rope_interleave),
        "add_qkv_bias": text.attention_bias,
        "add_proj_bias": text.attention_bias,
    }


def _yarn_factor(rule: dict) -> float:
    """The further factor of the scores (Transformers' `yarn_apply_mscale`)."""
    temperature = rule.get("mscale_all_dim")
    if rule["rope_type"] == "default" or not temperature or rule["factor"] <= 1:
        return 1.0
    return (0.1 * temperature * math.log(rule["factor"]) + 1.0) ** 2


def attention_rules(family: LlamaFamily) -> list[Rule]:
    """Rules for latent attention and the norm before it, in every layer."""
    text = family.text

    def rule(ours: str, hf_name: str, operation: Operation) -> Rule:
        return family.layer_rule(OURS + ours, [THEIRS + hf_name], operation)

    rules = [
        *family.norm_rules({"input_layernorm": "input_layernorm"}),
        rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", Whole()),
        rule("kv_layernorm.weight", "kv_a_layernorm.weight", Whole()),
        rule("linear_kv_up_proj.weight", "kv_b_proj.weight", Cut(0)),
        rule("linear_proj.weight", "o_proj.weight", Cut(1)),
    ]
    # queries come from the hidden states at once, or by way of a lower rank
    if text.q_lora_rank is None:
        rules.append(rule("linear_q_proj.weight", "q_proj.weight", Cut(0)))
    else:
        rules += [
            rule("linear_q_down_proj.weight", "q_a_proj.weight", Whole()),
            rule("q_layernorm.weight", "q_a_layernorm.weight", Whole()),
            rule("linear_q_up_proj.weight", "q_b_proj.weight", Cut(0)),
        ]
    # only what goes down to a lower rank, and the output, may have biases
    if text.attention_bias:
        rules += [
            rule("linear_kv_down_proj.bias", "kv_a_proj_with_mqa.bias", Whole()),
            rule("linear_proj.bias", "o_proj.bias", Whole()),
        ]
    if text.attention_bias and text.q_lora_rank is not None:
        rules.append(rule("linear_q_down_proj.bias", "q_a_proj.bias", Whole()))
    return rules
