"""Ministral 3 and Mistral Small 3.x: Pixtral tower for images of any size.

The text model is Ministral 3's, with YaRN and queries that grow with their position, or Mistral's.

Row-break and end tokens stand between the image tokens of a picture. They are ordinary embeddings: only image
tokens get features.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from transformers.models.pixtral import modeling_pixtral

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, texts, towers
from megatron_vlm.models.layers.tower_attention import use_segments, uses_segments
from megatron_vlm.parallel.setup import on_device


def _one_layer(layer: Any, hf_config: Any) -> bool:
    """Whether it names one layer: the projector's norm is as wide as one layer, also in Transformers."""
    return towers.layers_exist(layer, hf_config) and (isinstance(layer, int) or len(layer) == 1)


PIXTRAL = {"head_dim": limits.WHOLE_HEADS}  # of rotary alone


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
        states = pixtral_states(self.vision_tower, pixel_values, image_sizes, self.feature_layer)
        return self.multi_modal_projector(states.squeeze(0), image_sizes.tolist())


def pixtral_states(
    tower: PreTrainedModel, pixels: Tensor, image_sizes: Tensor, layers: int | list[int]
) -> Tensor:
    """The `towers.chosen_states` (1, P, E) of Pixtral's tower for images of these sizes (N, 2) in pixels.

    All patches are one sequence, whose attention is `tower_attention.attend`. The sizes are on the host, see
    `batch.HOST_FIELDS`.

    Transformers' own `forward` does the same, but makes places and bounds of patches on the device, with
    copies for which the host waits. It serves where a GPU has no kernel.
    """
    if not uses_segments(tower):
        return towers.chosen_states(tower, pixels, layers, image_sizes=image_sizes.tolist())
    shapes_N2 = image_sizes // tower.patch_size
    maps = tower.patch_conv(pixels.to(tower.patch_conv.weight.dtype))
    both = zip(maps, shapes_N2.tolist(), strict=True)
    patches = [patch_map[:, :rows, :columns].flatten(1).t() for patch_map, (rows, columns) in both]
    states = [tower.ln_pre(torch.cat(patches)[None])]
    places = on_device(_pixtral_places(tower.config, shapes_N2.tolist()), pixels.device)
    tables = tower.patch_positional_embedding(states[0], places)
    bounds = pad(shapes_N2.prod(-1).cumsum(0), (1, 0))
    for layer in tower.transformer.layers:
        states.append(layer(states[-1], None, position_embeddings=tables, host_bounds=bounds))
    return towers.chosen(states, layers)


def _pixtral_places(vision: Any, shapes: list[list[int]]) -> Tensor:
    """Where each patch lies in its image, as the tower's rotary embedding takes it: (P, 2) rows and columns;
    numbers (P,) before Transformers 5.13, which made a table of all places."""
    pairs = [torch.cartesian_prod(*map(partial(torch.arange, device="cpu"), shape)) for shape in shapes]
    places_P2 = torch.cat(pairs)
    if not hasattr(modeling_pixtral, "position_ids_in_meshgrid"):
        return places_P2
    return places_P2[:, 0] * (vision.image_size // vision.patch_size) + places_P2[:, 1]


def blank_of_any_size(vision: Any, multiple: int, pixels: int) -> dict[str, Tensor]:
    """A black square for Pixtral's tower whose sides are multiples of so many pixels."""
    side = multiple * max(1, round(min(pixels**0.5, vision.image_size) / multiple))
    return {
        "pixel_values": torch.zeros(1, vision.num_channels, side, side),
        # the host reads them, also while a model is built on the meta device
        "image_sizes": torch.tensor([[side, side]], device="cpu"),
    }


def pixtral_pairs(vision: Any, visual: GenericVisualInputs) -> int:
    patches_N = (visual.image_sizes // vision.patch_size).prod(-1)
    return int((patches_N**2).sum())


class Mistral3(texts.LikeLlava):
    model_type = "mistral3"
    top_limits = {
        "vision_feature_layer": limits.Limit("one of the " + towers.FEATURE_LAYERS.words, _one_layer)
    }
    vision_limits = PIXTRAL
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
        return blank_of_any_size(self.vision, self.merged_size, pixels)

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of merged patches of each item."""
        return (visual.image_sizes // self.merged_size).prod(-1).tolist()

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return pixtral_pairs(self.vision, visual)
