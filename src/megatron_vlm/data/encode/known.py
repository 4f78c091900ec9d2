"""What the known HF processors make of a conversation, without their detours.

Images and frames of videos stay bytes: they are decoded, resized by the kernel that the processors use, and
cut into patches once. `models.pixels` does the rest on the device; the result equals theirs to the bit. Ids
come from `data.encode.sizes`, which tokenizes the text without the tokens of images and videos.

A known processor is a line in KNOWN. Any other processor, or a known one with settings whose effect is not
known here, is called itself (`processors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv
from transformers import ProcessorMixin
from transformers.models.glm4v import image_processing_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2_vl
from transformers.video_utils import VideoMetadata

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.encode.marks import RenderedChat
from megatron_vlm.data.encode.sizes import ImageTokens, SizeEncoder
from megatron_vlm.data.encode.text import EncodedText, Grid, TextEncoder
from megatron_vlm.data.media import naflex
from megatron_vlm.data.media.images import decode_pixels
from megatron_vlm.data.media.patches import of_frames, of_image, pixtral_size
from megatron_vlm.data.media.videos import VideoPlan
from megatron_vlm.data.media_limits import fixed_size

RESAMPLE = {2: tv.InterpolationMode.BILINEAR, 3: tv.InterpolationMode.BICUBIC}  # Pillow's numbers
NEEDED = ("do_resize", "do_rescale", "do_normalize")
# images are RGB already and padded in any case; frames of videos are chosen before
WITHOUT_EFFECT = ("do_convert_rgb", "do_pad", "do_sample_frames")

ImageArray = np.ndarray  # (H, W, 3) uint8


@dataclass(frozen=True)
class Known:
    """What one processor class of transformers does to images and videos."""

    image_processor: str  # its class
    size_keys: tuple[str, ...]  # the keys of its `size`
    target: Callable[[Any, int, int], tuple[int, int]]  # (processor, height, width) → both after resizing
    image_ids: Callable[[Any, int, int], np.ndarray]  # (processor, height and width after resizing) → ids
    tensors: Callable[[Any, ImageArray], dict[str, Tensor]]  # (processor, a resized image) → what is batched
    video_processor: str | None = None  # its class
    # (processor, a video) → what is batched besides the video's pixels and grid
    video_fields: Callable[[Any, VideoPlan], dict[str, Tensor]] = lambda processor, plan: {}


class KnownProcessor:
    """A `Processor` that does the work itself: ids, masks and spans equal the HF processor's, and so do the
    uint8 pixels once a `PixelNormalizer` has normalized them."""

    decode = staticmethod(decode_pixels)

    def __init__(self, processor: ProcessorMixin, text: TextEncoder):
        self._processor = processor
        self._known = KNOWN[type(processor).__name__]
        self.sizes = SizeEncoder(processor, text)

    def measure(
        self, prompt: RenderedChat, sizes: list[tuple[int, int]], plans: list[VideoPlan]
    ) -> EncodedText:
        return self.sizes(prompt, [self._image_tokens(size) for size in sizes], plans)

    def __call__(
        self,
        prompt: RenderedChat,
        images: Iterable[ImageArray],
        videos: list[tuple[np.ndarray, VideoPlan]],
        text: EncodedText | None = None,
    ) -> tuple[EncodedText, dict[str, Tensor]]:
        tensors, sizes = [], []
        for image in images:  # cut each image right after it is decoded: its pixels are still in the caches
            tensors.append(self._known.tensors(self._processor, self._resized(image)))
            sizes.append(image.shape[1::-1])
        if text is None:
            text = self.measure(prompt, sizes, [plan for _, plan in videos])
        tensors += [self._video(*video, grid) for video, grid in zip(videos, text.video_grids, strict=True)]
        visual = GenericVisualInputs.cat([GenericVisualInputs(**one) for one in tensors])
        return text, visual.as_model_kwargs() if visual else {}

    def _resized(self, image: ImageArray) -> ImageArray:
        size = self._target(*image.shape[:2])
        return _resized(image, size, self._processor.image_processor.resample)

    def _video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        part = self._processor.video_processor
        size = grid[1] * part.patch_size, grid[2] * part.patch_size
        patches = of_frames(part, _resized(frames, size, part.resample), part.temporal_patch_size)
        tensors = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
        return tensors | self._known.video_fields(self._processor, plan)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        try:
            return self._known.target(self._processor, height, width)
        except ValueError as error:
            raise BadSample("processor_error", str(error)) from error

    def _image_tokens(self, size: tuple[int, int]) -> ImageTokens:
        width, height = size
        height, width = self._target(height, width)
        patches = (height // self.sizes.patch_size) * (width // self.sizes.patch_size)
        return self._known.image_ids(self._processor, height, width), patches


def why_unknown(processor: ProcessorMixin) -> str | None:
    """Why a processor's work cannot be done here; None if it can."""
    name = type(processor).__name__
    known = KNOWN.get(name)
    if known is None or not _is_transformers(processor):
        return f"{name} is not one of the known processors ({', '.join(KNOWN)})"
    for attribute in ("image_processor", "video_processor"):
        part, wanted = getattr(processor, attribute, None), getattr(known, attribute)
        if wanted and (type(part).__name__ != wanted or not _is_transformers(part)):
            return f"{name} with {type(part).__name__}, known is {wanted}"
        if wanted and (odd := _odd_settings(part, known.size_keys)):
            return f"{wanted} with {', '.join(odd)}"
    return None


def _odd_settings(part: Any, size_keys: tuple[str, ...]) -> list[str]:
    switches = {key: value for key, value in part.to_dict().items() if key.startswith("do_")}
    off = [key for key in NEEDED if not switches.pop(key, None)]
    on = [key for key, value in switches.items() if value and key not in WITHOUT_EFFECT]
    odd = [f"{key} = {getattr(part, key)}" for key in off + on]
    if part.resample is None or int(part.resample) not in RESAMPLE:
        odd.append(f"resample = {part.resample}")
    if not all(part.size.get(key) for key in size_keys):
        odd.append(f"size = {dict(part.size)}")
    return odd


def _is_transformers(part: Any) -> bool:
    return type(part).__module__.startswith("transformers.")  # not a subclass with its own ways


def _resized(pixels: np.ndarray, size: tuple[int, int], resample: Any) -> np.ndarray:
    """An image or frames, (..., H, W, 3) uint8, resized to `size`."""
    if size == pixels.shape[-3:-1]:
        return pixels
    # colours stay last in memory: more than twice as fast as colour by colour, with equal results
    colours_first = torch.from_numpy(pixels).movedim(-1, -3)
    resized = tv.resize(colours_first, list(size), RESAMPLE[int(resample)], antialias=True)
    return resized.movedim(-3, -1).numpy()


def _whole(processor: Any, image: ImageArray) -> dict[str, Tensor]:
    return {"pixel_values": torch.from_numpy(image)[None]}


def _whole_of_any_size(processor: Any, image: ImageArray) -> dict[str, Tensor]:
    return _whole(processor, image) | {"image_sizes": torch.from_numpy(np.array([image.shape[:2]]))}


def _gemma_ids(processor: Any, height: int, width: int) -> np.ndarray:
    return np.full(processor.image_seq_length, processor.tokenizer.image_token_id)


def _grid_ids(processor: Any, height: int, width: int) -> np.ndarray:
    merged = processor.image_processor.patch_size * processor.image_processor.merge_size
    return np.full((height // merged) * (width // merged), processor.image_token_id)


def _pixtral_ids(processor: Any, height: int, width: int) -> np.ndarray:
    """Rows of image tokens. A break token closes each row, the end token the last one."""
    merged = processor.patch_size * processor.spatial_merge_size
    ids = np.full((height // merged, width // merged + 1), processor.image_token_id)
    ids[:, -1] = processor.image_break_token_id
    ids[-1, -1] = processor.image_end_token_id
    return ids.ravel()


def _qwen_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    images = processor.image_processor
    limits = {"min_pixels": images.size["shortest_edge"], "max_pixels": images.size["longest_edge"]}
    return qwen2_vl.smart_resize(height, width, images.patch_size * images.merge_size, **limits)


def _glm_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    images = processor.image_processor
    frames = images.temporal_patch_size
    return glm4v.smart_resize(
        num_frames=frames,
        height=height,
        width=width,
        temporal_factor=frames,
        factor=images.patch_size * images.merge_size,
        min_pixels=images.size["shortest_edge"],
        max_pixels=images.size["longest_edge"],
    )


def _seconds_per_grid(processor: Any, plan: VideoPlan) -> dict[str, Tensor]:
    frames_per_second = VideoMetadata(**plan.metadata).sampled_fps
    seconds = processor.video_processor.temporal_patch_size / frames_per_second
    return {"second_per_grid_ts": torch.tensor([seconds])}


_GRID = ("shortest_edge", "longest_edge")
_GLM = (_GRID, _glm_size, _grid_ids, of_image)
_QWEN = ("Qwen2VLImageProcessor", _GRID, _qwen_size, _grid_ids, of_image)
KNOWN = {  # processor class of transformers → what it does
    "Gemma3Processor": Known("Gemma3ImageProcessor", ("height", "width"), fixed_size, _gemma_ids, _whole),
    "PixtralProcessor": Known(
        "PixtralImageProcessor", ("longest_edge",), pixtral_size, _pixtral_ids, _whole_of_any_size
    ),
    "Lfm2VlProcessor": Known("Lfm2VlImageProcessor", (), naflex.resized, naflex.image_ids, naflex.patches),
    "Glm4vProcessor": Known("Glm4vImageProcessor", *_GLM, "Glm4vVideoProcessor"),
    "Glm46VProcessor": Known("Glm46VImageProcessor", *_GLM, "Glm46VVideoProcessor"),
    "Qwen2VLProcessor": Known(*_QWEN, "Qwen2VLVideoProcessor"),
    "Qwen2_5_VLProcessor": Known(*_QWEN, "Qwen2VLVideoProcessor", _seconds_per_grid),
    "Qwen3VLProcessor": Known(*_QWEN, "Qwen3VLVideoProcessor"),
}
