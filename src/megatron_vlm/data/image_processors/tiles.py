"""Images in tiles beside the whole image, and frames that are tiles: InternVL's and LLaVA-OneVision's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.base import Frame, Grid, OneSize, resized
from megatron_vlm.data.media.images import MAX_DECODED_PIXELS
from megatron_vlm.data.media.videos import VideoPlan, outputs_of_plan

MOST_OF_SQUARE = 4 * MAX_DECODED_PIXELS  # 960 MB; the square of a long image takes many times its own memory


class Tiles(OneSize):
    """A spec whose tiles, and frames of videos, have one size."""

    splits = ""

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        outputs = outputs_of_plan(self.processor.video_processor, plan)
        text = self.processor.replace_video_token(outputs, 0)
        times, _, height, width = outputs["pixel_values_videos"][0].shape
        return text, (times, height // self.patch_size, width // self.patch_size)

    def tiled_frames(self, frames: np.ndarray) -> Tensor:
        """Frames (T, H, W, 3), each as a tile."""
        part = self.processor.video_processor
        return torch.from_numpy(resized(frames, (part.size["height"], part.size["width"]), part.resample))


class InternVLTiles(Tiles):
    """The tiles of an image, and behind several the image as a whole. To the model, frames are images."""

    marker_setting = "min_patches"
    known_processors = {
        ("InternVLProcessor", "GotOcr2ImageProcessor"): "InternVLVideoProcessor",
        ("QianfanOCRProcessor", "GotOcr2ImageProcessor"): None,
    }
    shared_settings = ("size", "resample", "rescale_factor", "image_mean", "image_std")
    overview_index = -1

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        size = self.size
        min_tiles = self.images.min_patches
        max_tiles = self.images.max_patches
        columns, rows = get_optimal_tiled_canvas(image.shape[:2], size, min_tiles, max_tiles)
        tiles = tiles_of(resized(image, (rows * size[0], columns * size[1]), self.images.resample), size)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self.fit(image)[None]])
        return {"pixel_values": torch.from_numpy(tiles)}

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        return {"pixel_values": self.tiled_frames(frames)}


class OneVisionTiles(Tiles):
    """A conversation's only image as a whole and then in tiles; an image among others is one tile."""

    marker_setting = "image_grid_pinpoints"
    known_processors = {
        ("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor"): "LlavaOnevisionVideoProcessor"
    }

    @property
    def patch_size(self) -> int:
        """The processor says how many patches a tile has, and not how large they are."""
        return self.size[0] // math.isqrt(self.processor.num_image_tokens)

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        of_tile = self.processor.num_image_tokens
        if not alone:
            return of_tile + 1, of_tile  # the end of a row behind it
        return self.processor_counts(height, width)[0], of_tile * self.tiles_of(height, width)

    def tiles_of(self, height: int, width: int) -> int:
        """How many tiles a conversation's only image has, the image as a whole included."""
        canvas = select_best_resolution((height, width), self.images.image_grid_pinpoints)
        return 1 + (canvas[0] // self.size[0]) * (canvas[1] // self.size[1])

    def refuse(self, height: int, width: int, alone: bool) -> None:
        if not alone:
            _square_of(height, width)

    def frame(self, width: int, height: int, alone: bool) -> Frame:
        if alone:
            return super().frame(width, height, alone)
        # in the middle of a square, which is scaled
        side = max(width, height)
        shown_side = self.size[1]
        x, y = ((side - length) // 2 * shown_side / side for length in (width, height))
        return Frame(*self.size[::-1], x, y, width * shown_side / side, height * shown_side / side)

    def arrange(self, images: Sequence[Any]) -> Sequence[Any]:
        return [images] if images else images

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The tiles and frames that there are, one after another.

        The processor gives pixel_values (N, most tiles, 3, H, W), and `batch_num_images`, the images of each
        conversation; pixel_values_videos (N, frames, 3, H, W).
        """
        outputs = dict(outputs)
        conversations = outputs.pop("batch_num_images", None)
        pixels = outputs.get("pixel_values")
        videos = outputs.get("pixel_values_videos")
        if pixels is not None and pixels.dim() == 5:
            counts = [1] * len(pixels) if conversations is None else conversations.flatten().tolist()
            alone = [count == 1 for count in counts for _ in range(count)]
            sizes = zip(outputs["image_sizes"].tolist(), alone, strict=True)
            tiles = [self.tiles_of(high, wide) if is_alone else 1 for (high, wide), is_alone in sizes]
            outputs["pixel_values"] = torch.cat([image[:n] for image, n in zip(pixels, tiles, strict=True)])
            outputs["image_tiles"] = torch.tensor(tiles)
        if videos is not None and videos.dim() == 5:
            outputs["pixel_values_videos"] = videos.flatten(0, 1)
            outputs["video_frames"] = torch.full((len(videos),), videos.shape[1])
        return outputs

    def odd_settings(self, part: Any) -> list[str]:
        odd = super().odd_settings(part)
        canvases = getattr(part, "image_grid_pinpoints", None) or []
        sides = {part.size["height"], part.size["width"]}
        whole_tiles = all(length % side == 0 for side in sides for canvas in canvases for length in canvas)
        if canvases and not (len(sides) == 1 and whole_tiles):
            odd.append(f"size = {dict(part.size)} and image_grid_pinpoints = {canvases}")
        return odd

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        size = image.shape[:2]
        tiles = []
        if alone:
            canvas = select_best_resolution(size, self.images.image_grid_pinpoints)
            inside = get_patch_output_size(image, canvas, "channels_last")
            tiles = [tiles_of(_centred(resized(image, inside, self.images.resample), canvas, 0), self.size)]
        else:
            background = [int(255 * mean) for mean in self.images.image_mean]
            image = _centred(image, _square_of(size[0], size[1]), background)
        pixels = np.concatenate([self.fit(image)[None], *tiles])
        return {
            "pixel_values": torch.from_numpy(pixels),
            "image_sizes": torch.tensor([size]),
            "image_tiles": torch.tensor([len(pixels)]),
        }

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        pixels = self.tiled_frames(frames)
        return {"pixel_values_videos": pixels, "video_frames": torch.tensor([len(pixels)])}


def _square_of(height: int, width: int) -> tuple[int, int]:
    """The square to which an image among others is padded. Raises BadSample if it is too large."""
    side = max(height, width)
    if side**2 > MOST_OF_SQUARE:
        raise BadSample("image_too_large", f"{width}x{height} is padded to a square by its processor")
    return side, side


def tiles_of(image: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """(tiles, height, width, 3), row after row."""
    rows = image.shape[0] // tile[0]
    columns = image.shape[1] // tile[1]
    # a line of a tile is copied at once, not colour by colour
    lines = image.reshape(rows, tile[0], columns, 3 * tile[1]).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(lines).reshape(-1, *tile, 3)


def _centred(image: np.ndarray, size: tuple[int, int], colour: Any) -> np.ndarray:
    """An image in the middle of a canvas of `size`, a half pixel to the top left if it must be."""
    canvas = np.empty((*size, 3), np.uint8)
    canvas[:] = colour
    height, width, _ = image.shape
    y = (size[0] - height) // 2
    x = (size[1] - width) // 2
    canvas[y : y + height, x : x + width] = image
    return canvas
