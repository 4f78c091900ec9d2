"""How models that keep tower, projector and language model side by side spell their keys."""

from __future__ import annotations

from typing import Any

from megatron_vlm.models.family_parts import llama, texts
from megatron_vlm.models.weights import Rule, Whole

MODEL = "language_model.model."
LAYER = MODEL + "layers.*."

# HF key prefixes in the wild -> the hub's
RENAMES = (
    (r"^vision_tower\.vision_model\.", "vision_tower."),
    (r"^model\.language_model\.", MODEL),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^lm_head\.", "language_model.lm_head."),
)


def outer_rules(hf_config: Any) -> list[Rule]:
    """Rules for tower, projector, embedding, last norm and output layer."""
    return [
        Rule("vision.vision_tower.**", ("vision_tower.**",), Whole()),
        Rule("vision.multi_modal_projector.**", ("multi_modal_projector.**",), Whole()),
        *llama.outer_rules(hf_config, MODEL, "language_model.lm_head.weight"),
    ]


def rules(hf_config: Any) -> list[Rule]:
    """Rules for all of a model whose text model is one of `texts`."""
    return [*outer_rules(hf_config), *texts.layer_rules(hf_config, LAYER)]
