"""Images in several pieces: tiles or squares beside the whole image, or a whole image and slices of it.

InternVL's and LLaVA-OneVision's tiles, SmolVLM's squares, which the text names by row and column, and
MiniCPM-V's slices. MiniCPM-V's processor lays the patches of all pieces side by side in `pixel_values` (1, C,
side, P * side), and `target_sizes` (N, 2) has the rows and columns of each piece. Here a piece is an item of
patches.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.smolvlm.image_processing_smolvlm import get_resize_output_image_size
from transformers.video_utils import VideoMetadata

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.base import RESAMPLE, Frame, Grid, OneSize, resized
from megatron_vlm.data.image_processors.grid import Patches, patches_of
from megatron_vlm.data.media.images import MAX_DECODED_PIXELS
from megatron_vlm.data.media.videos import VideoPlan, outputs_of_plan

MOST_OF_SQUARE = 4 * MAX_DECODED_PIXELS  # 960 MB; the square of a long image takes many times its own memory
LANCZOS = 1  # Pillow's number


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


class Squares(Tiles):
    """To the model, squares and frames of videos are images. A sample has either images or videos."""

    marker_setting = "max_image_size"
    overview_index = -1
    known_processors = {("SmolVLMProcessor", "SmolVLMImageProcessor"): "SmolVLMVideoProcessor"}
    size_keys = ("longest_edge",)
    optional_switches = ("do_image_splitting",)
    resamples = (*RESAMPLE, LANCZOS)
    shared_settings = ("rescale_factor", "image_mean", "image_std")
    writes_by_size = True

    @property
    def size(self) -> tuple[int, int]:
        side = self.images.max_image_size["longest_edge"]
        return side, side

    def processor_counts(self, height: int, width: int) -> tuple[int, int] | None:
        rows, columns = self._squares(height, width)
        tokens = getattr(self.processor, "image_seq_len", None)  # of a square
        return tokens and (tokens * (rows * columns + 1), rows * columns + 1)

    def of_size(self, height: int, width: int) -> tuple[str, int]:
        rows, columns = self._squares(height, width)
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return text, self.count(height, width, True)[1]

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        frames = len(plan.times)
        side = self.size[0] // self.patch_size
        outputs = {"pixel_values": torch.empty(1, frames), "video_metadata": [VideoMetadata(**plan.metadata)]}
        return self.processor.replace_video_token(outputs, 0), (frames, side, side)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The squares and frames that there are: padding, which the model leaves out, is zero."""
        outputs = dict(outputs)
        outputs.pop("pixel_attention_mask", None)  # all squares have the whole size
        pixels = outputs.get("pixel_values")
        if pixels is not None and pixels.dim() == 5:
            pixels = pixels.flatten(0, 1)
            outputs["pixel_values"] = pixels[pixels.flatten(1).any(1)]
        return outputs

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        rows, columns = self._squares(*image.shape[:2])
        side = self.size[0]
        squares = []
        image = self._resized(image, self.images.size)
        if rows:
            image = self._resized(image, SizeDict(height=rows * side, width=columns * side))
            squares = [tiles_of(image, self.size)]
        overview = self._resized(image, SizeDict(height=side, width=side))
        return {"pixel_values": torch.from_numpy(np.concatenate([*squares, overview[None]]))}

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        part = self.processor.video_processor
        pixels = part.resize(torch.from_numpy(frames).movedim(-1, -3), part.size, resample=part.resample)
        return {"pixel_values": pixels.movedim(-3, -1).contiguous()}

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of an image's squares, as `SmolVLMImageProcessor` makes them; none if it is
        shown as a whole alone."""
        if not self.images.do_image_splitting:
            return 0, 0
        side = self.size[0]
        shape_only = np.broadcast_to(np.uint8(0), (3, height, width))
        height, width = get_resize_output_image_size(shape_only, self.images.size["longest_edge"])
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _resized(self, image: np.ndarray, size: SizeDict) -> np.ndarray:
        # Transformers' own step: what stands for Lanczos' filter depends on versions
        colours_first = torch.from_numpy(image).movedim(-1, 0)
        return self.images.resize(colours_first, size, resample=self.images.resample).movedim(0, -1).numpy()


class Sliced(Patches):
    """The text has the image tokens of each piece between markers, and the image's number before them."""

    marker_setting = "max_slice_nums"
    known_processors = {
        (f"{name}Processor", "MiniCPMV4_6ImageProcessor"): "MiniCPMV4_6VideoProcessor"
        for name in ("MiniCPMV4_6", "MiniCPMV4_7")
    }
    writes_by_size = True

    def processor_counts(self, height: int, width: int) -> tuple[int, int] | None:
        with suppress(AttributeError, TypeError):
            _, sizes = self._pieces(self.images, height, width)
            patches = int(sizes.prod(-1).sum())
            return patches // self._patches_of_token(self.images), patches
        return None

    def label(self, number: int, token: str) -> str:
        processor = self.processor
        has_numbers = getattr(
            processor, "use_image_id", None
        )  # None, or no field up to 5.17: as its images' says
        if not (processor.default_use_image_id if has_numbers is None else has_numbers):
            return ""
        return processor._prepend_local_ids([token * (number + 1)], [""] * (number + 1), token)[-1]

    def of_size(self, height: int, width: int) -> tuple[str, int]:
        grid, sizes = self._pieces(self.images, height, width)
        outputs = {"grids": [grid], "num_patches_per_image": [len(sizes)], "target_sizes": sizes}
        divisor = self._patches_of_token(self.images)
        text = self.processor.replace_image_token(outputs, 0, image_token_divisor=divisor)
        return text, int(sizes.prod(-1).sum())

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        part = self.processor.video_processor
        frames = len(plan.times)
        grid, sizes = self._pieces(part, plan.size[1], plan.size[0])
        outputs = {
            "num_frames_per_video": [frames],
            "grids_videos": torch.tensor([grid] * frames),
            "target_sizes_videos": torch.from_numpy(sizes).repeat(frames, 1),
        }
        divisor = self._patches_of_token(part)
        text = self.processor.replace_video_token(outputs, 0, video_token_divisor=divisor)
        return text, (frames, int(sizes.prod(-1).sum()), 1)

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(outputs)
        for pixels, sizes, grids in (
            ("pixel_values", "target_sizes", "image_grid_thw"),
            ("pixel_values_videos", "target_sizes_videos", "video_grid_thw"),
        ):
            if sizes in outputs:
                outputs[grids] = pad(outputs.pop(sizes).long(), (1, 0), value=1)
                rows = outputs[pixels][0].unflatten(-1, (-1, outputs[pixels].shape[2]))
                outputs[pixels] = rows.permute(2, 0, 1, 3).flatten(1)
        return outputs

    def odd_settings(self, part: Any) -> list[str]:
        stacked = getattr(part, "stack_frames", 1)
        return super().odd_settings(part) + ([f"stack_frames = {stacked}"] if stacked != 1 else [])

    def target(self, height: int, width: int) -> tuple[int, int]:
        _, sizes = self._pieces(self.images, height, width)
        return tuple((sizes[0] * self.images.patch_size).tolist())

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        patches, sizes = self._cut(self.images, image[None])
        return {"pixel_values": patches, "image_grid_thw": _grids(sizes)}

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        patches, sizes = self._cut(self.processor.video_processor, frames)
        return {"pixel_values_videos": patches, "video_grid_thw": _grids(sizes).repeat(len(frames), 1)}

    def _cut(self, part: Any, frames: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """The patches of frames (T, H, W, 3), one after another, and the sizes of one frame's pieces."""
        side = part.patch_size
        (rows, columns), sizes = self._pieces(part, *frames.shape[1:3])
        overview_size = sizes[0] * side
        slice_size = sizes[-1] * side
        patches = []
        for frame in frames:
            pieces = [resized(frame, tuple(overview_size.tolist()), part.resample)]
            if rows:
                fine = resized(frame, tuple((slice_size * (rows, columns)).tolist()), part.resample)
                pieces += [*tiles_of(fine, tuple(slice_size.tolist()))]
            patches += [patches_of(piece[None], side, 1) for piece in pieces]
        return torch.cat(patches), sizes

    def _pieces(self, part: Any, height: int, width: int) -> tuple[list[int], np.ndarray]:
        """The rows and columns of slices, 0 if there are none, and the patches (pieces, 2) of each piece."""
        size = height, width
        resolution = part.scale_resolution
        options = {"patch_size": part.patch_size, "downsample_mode": part.downsample_mode}
        grid = part.get_sliced_grid(size, part.max_slice_nums, resolution) if part.slice_mode else None
        sizes = [part.find_best_resize(size, resolution, allow_upscale=grid is None, **options)]
        if grid is not None:
            fine = part.get_refine_size(size, grid, resolution, allow_upscale=True, **options)
            sizes += [(fine[0] // grid[0], fine[1] // grid[1])] * (grid[0] * grid[1])
        return grid or [0, 0], np.array(sizes) // part.patch_size

    def _patches_of_token(self, part: Any) -> int:
        return 4 if part.downsample_mode == "4x" else 16


def _grids(sizes_N2: np.ndarray) -> Tensor:
    return pad(torch.from_numpy(sizes_N2), (1, 0), value=1)
