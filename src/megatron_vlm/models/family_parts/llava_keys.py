"""How models that keep tower, projector and language model side by side spell their keys."""

from __future__ import annotations

from megatron_vlm.models.family_parts.llama import LlamaFamily
from megatron_vlm.models.family_parts.texts import HoldsTexts


class SideBySide(LlamaFamily):
    """A family with these keys and with a text model of its own."""

    # HF key prefixes in the wild -> the hub's
    renames = (
        (r"^vision_tower\.vision_model\.", "vision_tower."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
        (r"^lm_head\.", "language_model.lm_head."),
    )
    vision_keys = {
        "vision_tower.**": "vision_tower.**",
        "multi_modal_projector.**": "multi_modal_projector.**",
    }
    hf_model = "language_model.model."
    hf_head = "language_model.lm_head.weight"


class LikeLlava(HoldsTexts, SideBySide):
    """A family with these keys that can hold several text models."""
