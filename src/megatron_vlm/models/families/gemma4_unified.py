"""Gemma 4 12B: Gemma 4's text model without experts, and no tower: patches go through one dense layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.description import Description
from megatron_vlm.models.families import gemma4
from megatron_vlm.models.family_parts import limits
from megatron_vlm.parallel.setup import on_device


def _of_pooled(size: int, vision: Any) -> bool:
    return size == vision.patch_size * vision.pooling_kernel_size


class Gemma4UnifiedVision(nn.Module):
    """The HF embedder of patches: pixel_values (P, F) and image_grid_thw (N, 3), on the host, -> (P, D)."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.embed_vision = Gemma4UnifiedVisionEmbedder(hf_config.vision_config, hf_config.text_config)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        positions = [gemma4.positions_of(rows, columns) for _, rows, columns in image_grid_thw.tolist()]
        positions_P2 = on_device(torch.cat(positions), pixel_values.device)
        return self.embed_vision(pixel_values, positions_P2).pooler_output


class Gemma4Unified(gemma4.Gemma4):
    model_type = "gemma4_unified"
    text_limits = gemma4.TEXT
    vision_limits = {
        **dict.fromkeys(("patch_size", "pooling_kernel_size", "mm_embed_dim", "mm_posemb_size"), limits.SIZE),
        "output_proj_dims": limits.Limit("mm_embed_dim", lambda size, vision: size == vision.mm_embed_dim),
        "model_patch_size": limits.Limit("patch_size times pooling_kernel_size", _of_pooled),
    }
    groups = Description.groups | {
        "tower": ("vision.embed_vision.patch_", "vision.embed_vision.pos_"),
        "projector": ("vision.embed_vision.multimodal_embedder.",),
    }
    renames = (  # Transformers' names
        (r"^model\.embed_vision\.multimodal_embedder\.", "model.embed_vision."),
        (r"^model\.embed_vision\.(patch|pos)_", r"model.vision_embedder.\1_"),
    )
    vision_keys = {
        "embed_vision.patch_**": "model.vision_embedder.patch_**",
        "embed_vision.pos_**": "model.vision_embedder.pos_**",
        "embed_vision.multimodal_embedder.**": "model.embed_vision.**",
    }
    has_experts = False
    layer_inputs = 0
    blocks = "whole"
    peft_experts = ()
    merge_size = 1

    def vision_modules(self) -> nn.Module:
        return Gemma4UnifiedVision(self.hf_config)

    @property
    def patch_size(self) -> int:
        return self.vision.model_patch_size

    @property
    def positions_of_patches(self) -> int:
        return self.vision.mm_posemb_size

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """Patches do not see each other."""
        return 0
