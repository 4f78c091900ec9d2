"""InternVL 3 and 3.5 in the format of Transformers: tiles of one size, pixel shuffle, two linears.

The processor cuts an image into tiles and adds a thumbnail; a tile is an item of its own, and so is a frame.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, texts, towers


def _shuffles(ratio: Any, hf_config: Any) -> bool:
    """Whether squares of whole patches become one feature."""
    merged, patches = round(1 / ratio) if ratio else 0, _patches_a_side(hf_config.vision_config)
    # as Transformers asks; a third is rounded, and never a whole part
    return merged > 0 and patches % ratio == 0 and ratio * merged == 1 and patches % merged == 0


SQUARE = limits.Limit("two equal numbers", lambda size, _: len(size) == 2 and size[0] == size[1] > 0)


def _patches_a_side(vision: Any) -> int:
    return vision.image_size[0] // vision.patch_size[0]


class InternVLVision(nn.Module):
    """The HF tower and projector: tiles as pixel_values (N, 3, H, W) -> features (M, D)."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = towers.hf_tower(hf_config.vision_config)
        self.multi_modal_projector = InternVLMultiModalProjector(hf_config)
        self.feature_layer, self.ratio = hf_config.vision_feature_layer, hf_config.downsample_ratio
        self.side = _patches_a_side(hf_config.vision_config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values.to(self.multi_modal_projector.linear_1.weight.dtype)
        output = self.vision_tower(pixels, output_hidden_states=self.feature_layer != -1)
        last = self.feature_layer == -1  # after the tower's last norm, if it has one
        states_NPE = output.last_hidden_state if last else output.hidden_states[self.feature_layer]
        grid = states_NPE[:, 1:].unflatten(1, (self.side, self.side))  # without the class token
        shuffled = InternVLModel.pixel_shuffle(self, grid, self.ratio)  # it uses nothing of the model
        return self.multi_modal_projector(shuffled.flatten(1, 2)).flatten(0, 1)


class InternVL(texts.LikeLlava):
    model_type = "internvl"
    box_format = "ref_box"
    top_limits = {
        "downsample_ratio": limits.Limit(
            "1 / n for a power of 2 that divides the patches of a side", _shuffles
        ),
        "vision_feature_layer": limits.Limit(
            "a layer of the tower, and not 0",
            lambda layer, top: isinstance(layer, int) and towers.layers_exist(layer, top),
        ),
        "vision_feature_select_strategy": limits.only("default"),
    }
    vision_limits = {
        "image_size": SQUARE,
        "patch_size": SQUARE,
        "layer_scale_init_value": limits.UNUSED,
    }
    uses_part = True
    frames_as_images = True

    def vision_modules(self) -> nn.Module:
        return InternVLVision(self.hf_config)

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """Black tiles of the only size that the tower takes, as many as have about that area."""
        side = self.vision.image_size[0]
        tiles = max(1, round(pixels / side**2))
        return {"pixel_values": torch.zeros(tiles, self.vision.num_channels, side, side)}

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each tile."""
        towers.refuse_other_sizes(visual.pixel_values, self.vision)
        features_a_side = round(_patches_a_side(self.vision) * self.hf_config.downsample_ratio)
        return [features_a_side**2] * len(visual.pixel_values)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return len(visual.pixel_values) * (_patches_a_side(self.vision) ** 2 + 1) ** 2
