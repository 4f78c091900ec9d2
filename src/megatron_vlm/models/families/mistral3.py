"""Ministral 3 and Mistral Small 3.x: Pixtral tower for images of any size.

The text model is Ministral 3's, with YaRN and queries that grow with their position, or Mistral's.

Row-break and end tokens stand between the image tokens of a picture. They are ordinary embeddings: only image
tokens get features.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families.base import Family
from megatron_vlm.models.family_parts import keys, llava_keys, texts
from megatron_vlm.models.layers.tower_attention import use_segments
from megatron_vlm.models.weights import Rule
from megatron_vlm.supported import SUPPORTED


def _one_layer(layer: Any, hf_config: Any) -> bool:
    """Whether it names one layer: the projector's norm is as wide as one layer, also in Transformers."""
    return isinstance(layer, int) or len(layer) == 1


TEXT_TYPES = SUPPORTED["mistral3"].text_types
SECTIONS = keys.sections(
    keys.Section(
        ("mistral3",),
        keys.TOP
        | keys.any_of("image_token_index", "image_token_id", "projector_hidden_act")
        | keys.any_of("multimodal_projector_bias", "spatial_merge_size")
        | {"vision_feature_layer": keys.Values("one layer, alone or in a list", _one_layer)},
    ),
    texts.sections(TEXT_TYPES),
    keys.Section(
        ("pixtral",),
        keys.VISION
        | keys.any_of("num_hidden_layers", "num_attention_heads", "num_channels", "rope_parameters")
        | keys.any_of("tie_last_hidden_states"),
    ),
)


class PixtralVision(nn.Module):
    """The HF tower and projector; all images run as one sequence in which each image sees only itself.

    pixel_values (N, 3, H, W), padded right and bottom, and image_sizes (N, 2) -> features (M, D).
    """

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = use_segments(
            AutoModel.from_config(
                deepcopy(hf_config.vision_config), attn_implementation="sdpa", trust_remote_code=False
            )
        )
        self.multi_modal_projector = Mistral3MultiModalProjector(hf_config)
        layer = hf_config.vision_feature_layer
        self.feature_layer = layer if isinstance(layer, int) else layer[0]

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        sizes = image_sizes.tolist()  # they stay on the host, see batch.HOST_FIELDS
        patches = (image_sizes // self.vision_tower.patch_size).prod(-1)
        bounds = nn.functional.pad(patches.cumsum(0), (1, 0))
        states = self.vision_tower(
            pixel_values, image_sizes=sizes, output_hidden_states=True, host_bounds=bounds
        ).hidden_states
        return self.multi_modal_projector(states[self.feature_layer].squeeze(0), sizes)


def blank_image(hf_config: Any, pixels: int) -> dict[str, Tensor]:
    """A black square of whole merged patches."""
    vision = hf_config.vision_config
    merged = vision.patch_size * hf_config.spatial_merge_size
    side = merged * max(1, round(min(pixels**0.5, vision.image_size) / merged))
    return {
        "pixel_values": torch.zeros(1, vision.num_channels, side, side),
        "image_sizes": torch.tensor([[side, side]]),
    }


def visual_tokens(hf_config: Any, visual: GenericVisualInputs) -> list[int]:
    """The number of merged patches of each item."""
    merged = hf_config.vision_config.patch_size * hf_config.spatial_merge_size
    return (visual.image_sizes // merged).prod(-1).tolist()


def tower_pairs(hf_config: Any, visual: GenericVisualInputs) -> int:
    patches_N = (visual.image_sizes // hf_config.vision_config.patch_size).prod(-1)
    return int((patches_N**2).sum())


def weights(hf_config: Any) -> list[Rule]:
    return [*llava_keys.outer_rules(hf_config), *texts.layer_rules(hf_config, llava_keys.LAYER)]


def portable_config(config: dict) -> dict:
    """The config without the name of the tower's only rotary rule: no version of Transformers needs it, and
    versions up to 5.12 refuse it."""
    vision = dict(config["vision_config"])
    rule = vision.get("rope_parameters") or {}
    if rule.get("rope_type") == "axial":
        vision["rope_parameters"] = {key: value for key, value in rule.items() if key != "rope_type"}
    return config | {"vision_config": vision}


FAMILY = Family(
    model_type="mistral3",
    sections=SECTIONS,
    visual_keys=("pixel_values", "image_sizes"),
    architecture=texts.architecture,
    rotary=texts.rotary,
    build_vision=PixtralVision,
    blank_image=blank_image,
    visual_tokens=visual_tokens,
    tower_pairs=tower_pairs,
    weights=weights,
    renames=llava_keys.RENAMES,
    portable_config=portable_config,
)
