"""LLaVA 1.5 and what is built like it: a tower, the hidden states of some of its layers, two linears.

The tower is CLIP's or SigLIP's, for images of one size, or Pixtral's, for images of any size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families import mistral3
from megatron_vlm.models.family_parts import limits, texts, towers
from megatron_vlm.models.layers.tower_attention import use_segments

PIXTRAL, CLIP = "pixtral", "clip_vision_model"


class LlavaVision(nn.Module):
    """The HF tower and projector: pixel_values (N, 3, H, W), with image_sizes (N, 2) for Pixtral, -> (M, D).

    Several layers' hidden states stand side by side; "default" leaves out the first of an image.
    """

    def __init__(self, hf_config: Any):
        super().__init__()
        tower = towers.hf_tower(hf_config.vision_config)
        self.vision_tower = use_segments(tower) if hf_config.vision_config.model_type == PIXTRAL else tower
        self.multi_modal_projector = LlavaMultiModalProjector(hf_config)
        self.feature_layers = hf_config.vision_feature_layer
        self.first = int(hf_config.vision_feature_select_strategy == "default")

    def forward(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> Tensor:
        pixels = pixel_values.to(self.multi_modal_projector.linear_1.weight.dtype)
        if image_sizes is None:
            states_NPE = towers.chosen_states(self.vision_tower, pixels, self.feature_layers)
        else:
            states_NPE = mistral3.pixtral_states(self.vision_tower, pixels, image_sizes, self.feature_layers)
        return self.multi_modal_projector(states_NPE[:, self.first :]).flatten(0, 1)


class Llava(texts.LikeLlava):
    model_type = "llava"
    box_format = "shares"
    top_limits = {
        "vision_feature_layer": towers.FEATURE_LAYERS,
        "vision_feature_select_strategy": limits.Limit(
            '"full", or "default" if the tower is not Pixtral\'s',
            lambda name, top: (
                name == "full" or (name == "default" and top.vision_config.model_type != PIXTRAL)
            ),
        ),
    }
    tower_types = (CLIP, "siglip_vision_model", PIXTRAL)
    uses_part = True
    visual_keys = ("pixel_values", "image_sizes")

    @property
    def vision_limits(self) -> dict[str, limits.Limit]:
        return mistral3.PIXTRAL if self.any_size else {"projection_dim": limits.UNUSED}

    @property
    def any_size(self) -> bool:
        return self.vision.model_type == PIXTRAL

    @property
    def tower_tokens(self) -> int:
        """Patches of an image of the tower's size, and CLIP's class token."""
        return (self.vision.image_size // self.vision.patch_size) ** 2 + (self.vision.model_type == CLIP)

    def vision_modules(self) -> nn.Module:
        return LlavaVision(self.hf_config)

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        vision = self.vision
        if self.any_size:
            return mistral3.blank_of_any_size(vision, vision.patch_size, pixels)
        return {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """Patches; CLIP's tower has a class token as well, and "default" leaves out the first state."""
        vision = self.vision
        if self.any_size:
            return (visual.image_sizes // vision.patch_size).prod(-1).tolist()
        towers.refuse_other_sizes(visual.pixel_values, vision, exactly=vision.model_type == CLIP)
        tokens = self.tower_tokens - (self.hf_config.vision_feature_select_strategy == "default")
        return [tokens] * len(visual.pixel_values)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        if self.any_size:
            return mistral3.pixtral_pairs(self.vision, visual)
        return len(visual.pixel_values) * self.tower_tokens**2
