"""Gemma3: SigLIP tower, average-pooling projector, 5:1 local/global layers, bidirectional images."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import gemma, limits, llama, towers


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


class Gemma3(llama.SideBySide, gemma.GemmaFamily):
    model_type = "gemma3"
    top_limits = {"mm_tokens_per_image": TOKENS}
    text_limits = gemma.GemmaFamily.text_limits | {"use_bidirectional_attention": limits.only(False, None)}
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
