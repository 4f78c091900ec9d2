"""Gemma3: SigLIP tower, average-pooling projector, 5:1 local/global layers, bidirectional images."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, llama, towers
from megatron_vlm.models.layers.fused import Rotary, inverse_frequencies


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


def _tokens_fit(tokens: Any, hf_config: Any) -> bool:
    """Whether average pooling gives this number of tokens."""
    vision = hf_config.vision_config
    patches, side = int(vision.image_size // vision.patch_size), int(tokens**0.5)
    return 0 < side <= patches and (patches // (patches // side)) ** 2 == tokens


TOKENS = limits.Limit("what the projector makes of an image", _tokens_fit)


class Gemma3Vision(nn.Module):
    """The HF tower and projector: pixel_values (N, 3, H, W) -> features (N * mm_tokens_per_image, D)."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = towers.hf_tower(hf_config.vision_config)
        self.multi_modal_projector = Gemma3MultiModalProjector(hf_config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values.to(self.multi_modal_projector.mm_input_projection_weight.dtype)
        hidden_NPE = self.vision_tower(pixel_values=pixels).last_hidden_state
        return self.multi_modal_projector(hidden_NPE).flatten(0, 1)


class Gemma3(llama.SideBySide, GemmaFamily):
    model_type = "gemma3"
    top_limits = {"mm_tokens_per_image": TOKENS}
    text_limits = GemmaFamily.text_limits | {"use_bidirectional_attention": limits.only(False, None)}
    bidirectional_images = True

    @property
    def architecture(self) -> dict:
        return super().architecture | {
            "softmax_scale": self.text.query_pre_attn_scalar**-0.5,
            "layernorm_zero_centered_gamma": True,
        }

    def vision_modules(self) -> nn.Module:
        return Gemma3Vision(self.hf_config)

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """A black image of the only size that the tower takes."""
        side = self.vision.image_size
        return {"pixel_values": torch.zeros(1, self.vision.num_channels, side, side)}

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        towers.refuse_other_sizes(visual.pixel_values, self.vision)
        return [self.hf_config.mm_tokens_per_image] * len(visual.pixel_values)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return len(visual.pixel_values) * (self.vision.image_size // self.vision.patch_size) ** 4
