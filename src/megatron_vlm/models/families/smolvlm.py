"""SmolVLM2, and SmolVLM in its format: SigLIP's tower over squares of an image, pixel shuffle, one linear.

The processor cuts an image into squares and adds the whole; each is an item of its own, and so is a frame.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.models.family_parts import limits, texts, towers


def _shuffles(factor: Any, top: Any) -> bool:
    """Whether squares of whole patches become one feature."""
    vision = top.vision_config
    return factor > 0 == vision.image_size // vision.patch_size % factor


class SmolVLMVision(nn.Module):
    """The HF tower and projector: squares as pixel_values (N, 3, H, W) -> features (M, D)."""

    def __init__(self, tower: nn.Module, projector: nn.Module):
        super().__init__()
        self.vision_tower = tower
        self.multi_modal_projector = projector

    def forward(self, pixel_values: Tensor) -> Tensor:
        tower = self.vision_tower
        pixels = pixel_values.to(self.multi_modal_projector.modality_projection.proj.weight.dtype)
        patches = [length // tower.patch_size for length in pixels.shape[-2:]]
        patch_mask = torch.ones((len(pixels), *patches), dtype=torch.bool, device=pixels.device)
        # not the tower itself: it asks the device whether any patch is padding
        states_NPE = tower.encoder(
            tower.embeddings(pixels, patch_mask), attention_mask=None
        ).last_hidden_state
        return self.multi_modal_projector(tower.post_layernorm(states_NPE)).flatten(0, 1)


class SmolVLM(texts.HoldsTexts):
    model_type = "smolvlm"
    top_limits = {"scale_factor": limits.Limit("a divisor of the patches of a side", _shuffles)}
    frames_as_images = True
    images_or_videos = True  # its processor gives both the same name
    hf_model = "model.text_model."
    vision_keys = {
        "vision_tower.**": "model.vision_model.**",
        "multi_modal_projector.**": "model.connector.**",
    }

    def vision_modules(self) -> nn.Module:
        return SmolVLMVision(towers.hf_tower(self.vision), SmolVLMConnector(self.hf_config))

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """Black squares of the only size that the tower takes, as many as have about that area."""
        side = self.vision.image_size
        squares = max(1, round(pixels / side**2))
        return {"pixel_values": torch.zeros(squares, self.vision.num_channels, side, side)}

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each square, of whatever size."""
        features_a_side = self._patches_a_side(visual.pixel_values) // self.hf_config.scale_factor
        return [features_a_side**2] * len(visual.pixel_values)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return len(visual.pixel_values) * self._patches_a_side(visual.pixel_values) ** 4

    def _patches_a_side(self, pixels: Tensor) -> int:
        height, width = pixels.shape[1:3] if is_raw(pixels) else pixels.shape[2:]
        factor = self.hf_config.scale_factor
        side = height // self.vision.patch_size
        if side != width // self.vision.patch_size or side % factor:
            raise ValueError(
                f"images of {width} x {height} pixels, and features are of {factor} patches a side"
            )
        return side
