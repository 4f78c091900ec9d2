"""How models that keep tower, projector and language model side by side spell their keys."""

from __future__ import annotations

from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import llama
from megatron_vlm.models.family_parts.texts import HoldsTexts
from megatron_vlm.models.weights.rules import Rule, Whole

MODEL = "language_model.model."
LAYER = MODEL + "layers.*."


class SideBySide(Description):
    """A family with these keys and with a text model of its own."""

    # HF key prefixes in the wild -> the hub's
    renames = (
        (r"^vision_tower\.vision_model\.", "vision_tower."),
        (r"^model\.language_model\.", MODEL),
        (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
        (r"^lm_head\.", "language_model.lm_head."),
    )

    def outer_rules(self) -> list[Rule]:
        """Rules for tower, projector, embedding, last norm and output layer."""
        return [
            Rule("vision.vision_tower.**", ("vision_tower.**",), Whole()),
            Rule("vision.multi_modal_projector.**", ("multi_modal_projector.**",), Whole()),
            *llama.outer_rules(self.text.vocab_size, self.tied, MODEL, "language_model.lm_head.weight"),
        ]


class LikeLlava(HoldsTexts, SideBySide):
    """A family with these keys that can hold several text models."""

    @property
    def rules(self) -> list[Rule]:
        return [*self.outer_rules(), *self.layer_rules(LAYER)]
