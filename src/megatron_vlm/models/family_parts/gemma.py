"""Gemma's decoder layers: norms around each sub-layer, and kinds of layers with a rotary rule each."""

from typing import Any

from megatron_vlm.models.family_parts import limits, llama
from megatron_vlm.models.layers.rotary import Rotary, inverse_frequencies


class GemmaFamily(llama.LlamaFamily):
    """A family with these layers."""

    box_format = "box_2d"
    text_limits = limits.WINDOWS | {"hidden_activation": limits.ACTIVATION}
    rope_by_layer = True
    norm_before_mlp = "pre_feedforward_layernorm"
    norms_after = {
        "self_attn_bda.norm": "post_attention_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }

    def text_of(self, kind: str) -> Any:
        """The text model's config as layers of one kind have it."""
        return self.text

    @property
    def layer_kinds(self) -> list[str]:
        """The kinds of layers; each has a rotary rule of its own."""
        return sorted(set(self.text.layer_types))

    @property
    def architecture(self) -> dict:
        text = self.text
        of_first = self.text_of(text.layer_types[0])
        return llama.architecture(of_first, self.tied, activation="hidden_activation") | {
            **llama.attention_bias(text),
            "qk_layernorm": True,
            "norm_after_sublayer": True,
            "embedding_scale": text.hidden_size**0.5,
            "layer_windows": llama.layer_windows(text),
            "layer_rotary": tuple(self.layer_kinds.index(kind) for kind in text.layer_types),
        }

    def rotary(self) -> Rotary:
        return Rotary([inverse_frequencies(self.text_of(kind), kind) for kind in self.layer_kinds])
