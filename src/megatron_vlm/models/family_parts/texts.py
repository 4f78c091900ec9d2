"""The text models that several families can hold, by their own HF model_type.

A family with a text model of its own says the same of it in its file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.models.family_parts import latent, limits, llama, moe_rules
from megatron_vlm.models.layers.rotary import Rotary, inverse_frequencies
from megatron_vlm.models.weights.rules import Rule


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
        latent.DEEPSEEK_V3,
        architecture=lambda text: latent.architecture(text) | moe_rules.sigmoid(text),
        rope_limits=latent.ROPE,
        attention_rules=latent.attention_rules,
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
        latent.MISTRAL4,
        architecture=lambda text: latent.architecture(text) | moe_rules.deepseek(text),
        rope_limits=_LLAMA4_SCALING | latent.MISTRAL4_ROPE,
        query_scale=lambda text: partial(query_scale, text.rope_parameters),
        attention_rules=latent.attention_rules,
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
