"""LLaVA-OneVision: SigLIP's tower over tiles of an image, whose padding is cut off, and Qwen2's text model.

The only image of a conversation is one tile with all of it, then rows of tiles, with a learned feature at the
end of each row of features. An image among others is one tile. So is a frame, whose features are pooled.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    LlavaOnevisionMultiModalProjector,
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
    unpad_image,
)

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import limits, texts, towers

LEAST_SHRINKING = 1.1  # of a side, as in Transformers: features of larger images are shrunk


def _whole_tiles(pinpoints: Any, hf_config: Any) -> bool:
    side = hf_config.vision_config.image_size
    pairs = pinpoints and all(isinstance(size, list | tuple) and len(size) == 2 for size in pinpoints)
    return bool(pairs) and all(min(p) > 0 == max(n % side for n in p) for p in pinpoints)


def _at_most(ratio: Any, hf_config: Any) -> bool:
    tile_count = ratio.removeprefix("anyres_max_")
    return tile_count != ratio and tile_count.isdecimal() and int(tile_count) > 0


class OneVision(nn.Module):
    """The HF tower, projector and the end of a row: tiles and frames of all items -> features (M, D).

    Images are pixel_values (tiles, 3, H, W), image_tiles (N,) and image_sizes (N, 2), of the original images;
    videos are pixel_values_videos (frames, 3, H, W) and video_frames (N,).
    """

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = towers.hf_tower(hf_config.vision_config)
        self.multi_modal_projector = LlavaOnevisionMultiModalProjector(hf_config)
        self.image_newline = nn.Parameter(torch.zeros(hf_config.text_config.hidden_size))
        self.config = hf_config  # Transformers' functions for features read it, and nothing else of a model

    def forward(
        self,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        image_tiles: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_frames: Tensor | None = None,
    ) -> Tensor:
        features = []
        if pixel_values is not None:
            tiles = self._of_tiles(pixel_values).split(image_tiles.tolist())
            features += packed(self.config, tiles, image_sizes, self.image_newline)
        if pixel_values_videos is not None:
            pooled = LlavaOnevisionModel.apply_pooling(self, self._of_tiles(pixel_values_videos))
            for frames in pooled.split(video_frames.tolist()):
                features += [frames.flatten(0, 1), self.image_newline[None].to(frames.dtype)]
        return torch.cat(features)

    def _of_tiles(self, pixels: Tensor) -> Tensor:
        """(tiles, patches, D)"""
        pixels = pixels.to(self.multi_modal_projector.linear_1.weight.dtype)
        layers = self.config.vision_feature_layer
        return self.multi_modal_projector(towers.chosen_states(self.vision_tower, pixels, layers))


def packed(hf_config: Any, tiles: Sequence[Tensor], image_sizes: Tensor, newline: Tensor) -> list[Tensor]:
    """The features (M, D) of each image: its tiles' (tiles, patches, D), with `newline` (D,) after rows.
    They are what Transformers' `pack_image_features` makes, which also copies their numbers to the
    device, and the host waits for it."""
    return [
        _in_rows(hf_config, of_image, size, newline)
        if len(of_image) > 1
        else torch.cat((of_image[0], newline[None].to(of_image)))
        for of_image, size in zip(tiles, image_sizes.tolist(), strict=True)
    ]


def _in_rows(hf_config: Any, tiles: Tensor, size: list[int], newline: Tensor) -> Tensor:
    """The first tile's features, and the others' in the rows of the image, without its padding; shrunk where
    there are too many."""
    tile = hf_config.vision_config.image_size
    side = tile // hf_config.vision_config.patch_size
    grid = get_anyres_image_grid_shape(size, hf_config.image_grid_pinpoints, tile)
    # (rows of tiles, columns of tiles, rows, columns, D) -> (D, rows of the image, columns of the image)
    image_DHW = tiles[1:].unflatten(0, grid).unflatten(2, (side, side)).permute(4, 0, 2, 1, 3)
    image_DHW = unpad_image(image_DHW.flatten(3, 4).flatten(1, 2), size)
    height, width = image_DHW.shape[1:]
    tile_count = int(hf_config.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(height * width / (tile_count * side**2))
    if ratio > LEAST_SHRINKING:
        shrunk = [int(height // ratio), int(width // ratio)]
        image_DHW = interpolate(image_DHW[None], shrunk, mode="bilinear")[0]
    ends_DH1 = newline[:, None, None].expand(*image_DHW.shape[:2], 1).to(image_DHW)
    return torch.cat((tiles[0], torch.cat((image_DHW, ends_DH1), dim=-1).flatten(1).t()))


class LlavaOnevision(texts.LikeLlava):
    model_type = "llava_onevision"
    box_format = "shares"
    top_limits = {
        **dict.fromkeys(("video_token_index", "video_token_id"), limits.VIDEO_TOKEN),
        "image_grid_pinpoints": limits.Limit("pairs of multiples of the tower's image_size", _whole_tiles),
        "vision_aspect_ratio": limits.Limit('"anyres_max_" and a number above 0', _at_most),
        "vision_feature_layer": towers.FEATURE_LAYERS,
        "vision_feature_select_strategy": limits.only("full"),
    }
    uses_part = True
    visual_keys = ("pixel_values", "image_sizes", "image_tiles", "pixel_values_videos", "video_frames")
    vision_keys = {"image_newline": "image_newline", **texts.LikeLlava.vision_keys}
    renames = (*texts.LikeLlava.renames, (r"^model\.image_newline$", "image_newline"))
    groups = Description.groups | {"projector": ("vision.multi_modal_projector.", "vision.image_newline")}

    @property
    def patches_a_side(self) -> int:
        """How many patches a side of a tile has."""
        return self.vision.image_size // self.vision.patch_size

    def tiles_of(self, size: list[int], alone: bool) -> int:
        """How many tiles an image of (height, width) has, which is its conversation's only one or not."""
        pinpoints = self.hf_config.image_grid_pinpoints
        return image_size_to_num_patches(list(size), pinpoints, self.vision.image_size) if alone else 1

    def vision_modules(self) -> nn.Module:
        return OneVision(self.hf_config)

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """A black square, in tiles if it has an area."""
        vision, side = self.vision, max(1, round(pixels**0.5))
        tiles = self.tiles_of([side, side], alone=pixels > 0)
        return {
            "pixel_values": torch.zeros(tiles, vision.num_channels, vision.image_size, vision.image_size),
            # the host reads them, also while a model is built on the meta device
            "image_sizes": torch.tensor([[side, side]], device="cpu"),
            "image_tiles": torch.tensor([tiles], device="cpu"),
        }

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each image, then of each video."""
        side, counts = self.patches_a_side, []
        for pixels in (visual.pixel_values, visual.pixel_values_videos):
            if pixels is not None:
                towers.refuse_other_sizes(pixels, self.vision)
        if visual.image_tiles is not None:
            tiles = [torch.empty(n, side**2, 1, device="meta") for n in visual.image_tiles.tolist()]
            newline = torch.empty(1, device="meta")
            try:
                features = packed(self.hf_config, tiles, visual.image_sizes, newline)
            except (ArithmeticError, RuntimeError) as error:  # resized to none, or tiles of other canvases
                sizes = ", ".join(f"{width} x {height}" for height, width in visual.image_sizes.tolist())
                raise ValueError(
                    f"images of {sizes} pixels, whose tiles give no features: {error}"
                ) from error
            counts = [len(rows) for rows in features]
        frames = [] if visual.video_frames is None else visual.video_frames.tolist()
        return counts + [n * ((side + 1) // 2) ** 2 + 1 for n in frames]

    def tower_units(self, visual: GenericVisualInputs) -> int:
        """Tiles and frames: features are fewer than patches where they are pooled or cut off."""
        both = (visual.pixel_values, visual.pixel_values_videos)
        return sum(len(pixels) for pixels in both if pixels is not None)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        return self.tower_units(visual) * self.patches_a_side**4
