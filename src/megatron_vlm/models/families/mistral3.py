"""Ministral 3 and Mistral Small 3.x: Pixtral tower for images of any size.

The text model is Ministral 3's, with YaRN and queries that grow with their position, or Mistral's.

Row-break and end tokens stand between the image tokens of a picture. They are ordinary embeddings: only image
tokens get features.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, texts, towers
from megatron_vlm.models.layers.tower_attention import use_segments


def _one_layer(layer: Any, hf_config: Any) -> bool:
    """Whether it names one layer: the projector's norm is as wide as one layer, also in Transformers."""
    return towers.layers_exist(layer, hf_config) and (isinstance(layer, int) or len(layer) == 1)


class PixtralVision(nn.Module):
    """The HF tower and projector; all images run as one sequence in which each image sees only itself.

    pixel_values (N, 3, H, W), padded right and bottom, and image_sizes (N, 2) -> features (M, D). `tower` is
    the tower's config.
    """

    def __init__(self, tower: Any, projector: nn.Module, feature_layer: int = -1):
        super().__init__()
        self.vision_tower = use_segments(towers.hf_tower(tower))
        self.multi_modal_projector = projector
        self.feature_layer = feature_layer

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        states = towers.pixtral_states(self.vision_tower, pixel_values, image_sizes, self.feature_layer)
        return self.multi_modal_projector(states.squeeze(0), image_sizes.tolist())


class Mistral3(texts.LikeLlava):
    model_type = "mistral3"
    top_limits = {
        "vision_feature_layer": limits.Limit("one of the " + towers.FEATURE_LAYERS.words, _one_layer)
    }
    vision_limits = towers.PIXTRAL
    visual_keys = ("pixel_values", "image_sizes")

    @property
    def merged_size(self) -> int:
        """The side of a merged patch in pixels."""
        return self.vision.patch_size * self.hf_config.spatial_merge_size

    @property
    def feature_layer(self) -> int:
        layer = self.hf_config.vision_feature_layer
        return layer if isinstance(layer, int) else layer[0]

    @property
    def uses_part(self) -> bool:
        return self.feature_layer != -1

    def vision_modules(self) -> nn.Module:
        projector = Mistral3MultiModalProjector(self.hf_config)
        return PixtralVision(self.vision, projector, self.feature_layer)

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """A black square of whole merged patches."""
        return towers.blank_of_any_size(self.vision, self.merged_size, pixels)

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of merged patches of each item."""
        return (visual.image_sizes // self.merged_size).prod(-1).tolist()

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return towers.pixtral_pairs(self.vision, visual)
