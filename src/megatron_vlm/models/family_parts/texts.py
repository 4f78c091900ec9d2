"""The text models that several families can hold, by their own HF model_type.

A family with a text model of its own says the same of it in its file. DeepSeek-V3 and Mistral Small 4 have
latent attention.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.models.family_parts import limits, llama, moe_rules
from megatron_vlm.models.layers.attention_sizes import LatentHeads
from megatron_vlm.models.layers.fused import Rotary, inverse_frequencies
from megatron_vlm.models.weights.rules import Cut, Operation, Rule, Whole

OURS = "self_attention."
THEIRS = "self_attn."


def latent_scores(text: Any) -> int:
    """The channels of a query and of a key."""
    return text.qk_nope_head_dim + text.qk_rope_head_dim


def _is_turned_part(factor: Any, rule_and_text: tuple[dict, Any]) -> bool:
    text = rule_and_text[1]
    return factor is not None and int(text.head_dim * factor) == text.qk_rope_head_dim


LATENT_SCORES = limits.Limit(
    "qk_nope_head_dim + qk_rope_head_dim", lambda width, text: width == latent_scores(text)
)
LATENT_LIMITS = {
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), limits.SIZE),
    "q_lora_rank": limits.SIZE_OR_NULL,
    "qk_rope_head_dim": limits.EVEN,
    "qk_head_dim": LATENT_SCORES,
    "num_key_value_heads": limits.Limit(
        "num_attention_heads", lambda groups, text: groups == text.num_attention_heads
    ),
}
DEEPSEEK_V3 = {
    **LATENT_LIMITS,
    **moe_rules.DEEPSEEK,
    **moe_rules.SIGMOID,
    "head_dim": limits.Limit("qk_rope_head_dim", lambda width, text: width == text.qk_rope_head_dim),
    # without it, Transformers takes queries of the text for some of the tower when it reads a Kimi
    "q_lora_rank": limits.Limit("above 0", lambda rank, text: bool(rank) and rank > 0),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), limits.UNUSED),
}
MISTRAL4 = {
    **LATENT_LIMITS,
    **moe_rules.DEEPSEEK,
    "head_dim": LATENT_SCORES,
    # a group is ranked by what softmax gives, in Megatron by what comes before
    "n_group": limits.Limit("topk_group", lambda count, text: 0 < count == text.topk_group),
}
LATENT_ROPE = limits.not_null("factor", "linear", "llama3", "yarn")
MISTRAL4_ROPE = LATENT_ROPE | {
    "rope_type": limits.only("yarn"),  # in Transformers the default one turns whole heads
    "partial_rotary_factor": limits.Limit("qk_rope_head_dim / head_dim", _is_turned_part),
}


def latent_architecture(text: Any) -> dict:
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


def latent_attention_rules(family: llama.LlamaFamily) -> list[Rule]:
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


@dataclass(frozen=True)
class Text:
    """One text model. Every function takes its config, the model's `text_config`."""

    limits: dict[str, limits.Limit]
    architecture: Callable[[Any], dict]  # what it adds to `llama.architecture`
    rope_limits: dict[str, limits.Limit] = field(default_factory=lambda: RULES)
    query_scale: Callable[[Any], Callable[[Tensor], Tensor] | None] = lambda text: None
    attention_rules: Callable[[llama.LlamaFamily], list[Rule]] = llama.LlamaFamily.attention_rules
    feed_forward_rules: Callable[[llama.LlamaFamily], list[Rule]] = llama.LlamaFamily.feed_forward_rules
    carried_keys: Callable[[llama.LlamaFamily], dict[str, str]] = lambda family: {}


class HoldsTexts(llama.LlamaFamily):
    """A family that can hold several of TEXTS."""

    @property
    def text_kind(self) -> Text:
        return TEXTS[self.text.model_type]

    @property
    def text_limits(self) -> dict[str, limits.Limit]:
        return self.text_kind.limits

    @property
    def rope_limits(self) -> dict[str, limits.Limit]:
        return self.text_kind.rope_limits

    @property
    def architecture(self) -> dict:
        fields = self.text_kind.architecture(self.text)
        return llama.architecture(self.text, self.tied) | fields | _bounded(self.text)

    @property
    def carried_keys(self) -> dict[str, str]:
        return self.text_kind.carried_keys(self)

    def attention_rules(self) -> list[Rule]:
        return self.text_kind.attention_rules(self)

    def feed_forward_rules(self) -> list[Rule]:
        return self.text_kind.feed_forward_rules(self)

    def rotary(self) -> Rotary:
        return Rotary([inverse_frequencies(self.text)], query_scale=self.text_kind.query_scale(self.text))


class LikeLlava(HoldsTexts, llama.SideBySide):
    """A family with LLaVA's keys that can hold several of TEXTS."""


def _bounded(text: Any) -> dict:
    """The rule "dynamic" is the default one up to max_position_embeddings; further on, Transformers' depends
    on the longest row of a batch."""
    dynamic = text.rope_parameters["rope_type"] == "dynamic"
    return {"most_positions": text.max_position_embeddings} if dynamic else {}


def _same_window(text: Any) -> dict:
    """Every layer of Mistral has the same window."""
    return {"layer_windows": (text.sliding_window,) * text.num_hidden_layers if text.sliding_window else ()}


def query_scale(rule: dict, position_ids: Tensor) -> Tensor:
    """Factor on the queries (Llama 4's attention temperature): grows with every period of positions."""
    period = rule["original_max_position_embeddings"]
    return 1 + rule["llama_4_scaling_beta"] * torch.log(1 + torch.floor(position_ids / period))


# no field of Qwen2's, which Transformers reads if it is there
_GIVEN = limits.Limit("even and above 0", lambda width, text: width is not None and width > 0 == width % 2)
_WINDOW = {"sliding_window": limits.SIZE_OR_NULL}
RULES = {"rope_type": limits.only("default", "linear", "llama3", "yarn", "dynamic")}
_LLAMA4_SCALING = dict.fromkeys(("llama_4_scaling_beta", "original_max_position_embeddings"), limits.NUMBER)

TEXTS = {
    "deepseek_v3": Text(
        DEEPSEEK_V3,
        architecture=lambda text: latent_architecture(text) | moe_rules.sigmoid(text),
        rope_limits=LATENT_ROPE,
        attention_rules=latent_attention_rules,
        feed_forward_rules=moe_rules.sigmoid_rules,
        carried_keys=moe_rules.after_the_last,
    ),
    "llama": Text({}, architecture=llama.attention_bias),
    "mistral": Text(_WINDOW, architecture=_same_window),
    "ministral3": Text(
        _WINDOW,
        architecture=_same_window,
        rope_limits=_LLAMA4_SCALING,
        query_scale=lambda text: partial(query_scale, text.rope_parameters),
    ),
    "mistral4": Text(
        MISTRAL4,
        architecture=lambda text: latent_architecture(text) | moe_rules.deepseek(text),
        rope_limits=_LLAMA4_SCALING | MISTRAL4_ROPE,
        query_scale=lambda text: partial(query_scale, text.rope_parameters),
        attention_rules=latent_attention_rules,
        feed_forward_rules=moe_rules.deepseek_rules,
        carried_keys=moe_rules.after_the_last,
    ),
    "qwen2": Text(
        limits.WINDOWS | {"head_dim": _GIVEN},
        architecture=lambda text: {"add_qkv_bias": True, "layer_windows": llama.layer_windows(text)},
    ),
    "qwen3": Text(
        limits.WINDOWS,
        architecture=lambda text: {
            **llama.attention_bias(text),
            "qk_layernorm": True,
            "layer_windows": llama.layer_windows(text),
        },
    ),
}
