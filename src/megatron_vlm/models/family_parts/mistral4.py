"""Mistral Small 4's text model: latent attention, and experts that are chosen by a softmax of all."""

from collections.abc import Iterable
from typing import Any

from megatron_vlm.models.family_parts import keys, latent, moe_rules


def _is_turned_part(factor: Any, rule_and_text: tuple[dict, Any]) -> bool:
    text = rule_and_text[1]
    return factor is not None and int(text.head_dim * factor) == text.qk_rope_head_dim


def section(scaling: Iterable[str]) -> keys.Section:
    """`scaling`: keys of `rope_parameters` that let queries grow with their position."""
    return keys.Section(
        ("mistral4",),
        latent.TEXT
        | moe_rules.DEEPSEEK
        | {
            "head_dim": latent.SCORES,
            "qk_head_dim": latent.SCORES,
            # a group is ranked by what softmax gives, in Megatron by what comes before
            "n_group": keys.Values("topk_group", lambda count, text: 0 < count == text.topk_group),
        },
        no_effect=("pretraining_tp",),
        rope=keys.ROPE
        | dict.fromkeys(scaling, keys.NUMBER)
        | {
            "rope_type": keys.only("yarn"),  # in Transformers the default one turns whole heads
            "partial_rotary_factor": keys.Values("qk_rope_head_dim / head_dim", _is_turned_part),
        },
    )


def architecture(text: Any) -> dict:
    return latent.architecture(text) | moe_rules.deepseek(text)
