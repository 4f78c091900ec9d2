"""What the known HF processors make of a conversation, without their detours.

Images stay bytes: decoded, resized by the same kernel as theirs, cut into patches once. `models.pixels` does
the rest, on the device, and the result is theirs to the bit. Ids come from `data.lengths`, which tokenizes
the text without the images' tokens.

A known processor is a line in KNOWN. Any other, and a known one with settings whose effect is not known here,
is called itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as tv
from transformers import ProcessorMixin
from transformers.models.glm4v import image_processing_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2_vl

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.lengths import (
    PROBE_MESSAGES,
    PROBE_SIZE,
    ImageTokens,
    Layout,
    Measure,
    fixed_size,
    pixtral_size,
)
from megatron_vlm.data.spans import EncodedText, SpanProcessor

RESAMPLE = {2: tv.InterpolationMode.BILINEAR, 3: tv.InterpolationMode.BICUBIC}  # Pillow's numbers
NEEDED = ("do_resize", "do_rescale", "do_normalize")
WITHOUT_EFFECT = ("do_convert_rgb", "do_pad")  # images are RGB, and padded in any case

ImageArray = np.ndarray  # (H, W, 3) uint8


@dataclass(frozen=True)
class Known:
    """What one processor class of transformers does to images."""

    image_processor: str  # the class
    size_keys: tuple[str, ...]  # of its `size`
    target: Callable[[Any, int, int], tuple[int, int]]  # (processor, height, width) → after resizing
    image_ids: Callable[[Any, int, int], np.ndarray]  # (processor, height, width after resizing)
    tensors: Callable[[Any, ImageArray], dict[str, Tensor]]  # (processor, a resized image) → what is batched


class FastProcessor:
    """Called as `SpanProcessor`, with images as `decode_pixels` gives them: equal ids, masks and spans, and
    uint8 `pixel_values` that a `PixelNormalizer` makes equal to the processor's.

    `fast_processor` makes one.
    """

    def __init__(self, processor: ProcessorMixin, encode_text: SpanProcessor):
        self._processor = processor
        self._known = KNOWN[type(processor).__name__]
        self._interpolation = RESAMPLE[int(processor.image_processor.resample)]
        self.measure = Measure(processor, encode_text, self._image_tokens)

    def __call__(
        self,
        messages: list[dict],
        tools: list[dict] | None,
        images: Iterable[ImageArray],
        layout: Layout | None = None,
    ) -> EncodedText:
        """`layout` is what `measure` gave for the conversation, if that is known already.

        Raises BadSample as `SpanProcessor`.
        """
        outputs, sizes = self.tensors(images)
        layout = layout or self.measure(messages, tools, sizes)
        return EncodedText(layout.input_ids, layout.reply_mask, layout.images, layout.videos, outputs)

    def tensors(self, images: Iterable[ImageArray]) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        """The visual fields of the images, pixels raw, and the images' (width, height).

        Each is taken when the one before is cut: what was just decoded is still in the caches.
        """
        tensors, sizes = [], []
        for image in images:
            tensors.append(GenericVisualInputs(**self._known.tensors(self._processor, self._resized(image))))
            sizes.append(image.shape[1::-1])
        visual = GenericVisualInputs.cat(tensors)
        return visual.as_model_kwargs() if visual else {}, sizes

    def _resized(self, image: ImageArray) -> ImageArray:
        size = self._target(*image.shape[:2])
        if size == image.shape[:2]:
            return image
        # colours last in memory: more than twice as fast as colour by colour, and equal
        colours_first = torch.from_numpy(image).permute(2, 0, 1)
        resized = tv.resize(colours_first, list(size), self._interpolation, antialias=True)
        return resized.permute(1, 2, 0).numpy()

    def _target(self, height: int, width: int) -> tuple[int, int]:
        try:
            return self._known.target(self._processor, height, width)
        except ValueError as error:
            raise BadSample("processor_error", str(error)) from error

    def _image_tokens(self, size: tuple[int, int]) -> ImageTokens:
        width, height = size
        height, width = self._target(height, width)
        patches = (height // self.measure.patch_size) * (width // self.measure.patch_size)
        return self._known.image_ids(self._processor, height, width), patches


def fast_processor(
    processor: ProcessorMixin, encode_text: SpanProcessor
) -> tuple[FastProcessor | None, str | None]:
    """The stand-in for a processor, or None and why it has none."""
    reason = _unknown(processor)
    if reason:
        return None, reason
    try:
        fast = FastProcessor(processor, encode_text)
        theirs = encode_text(PROBE_MESSAGES, None, [Image.new("RGB", PROBE_SIZE)])
        ours = fast(PROBE_MESSAGES, None, [np.zeros((*PROBE_SIZE[::-1], 3), np.uint8)])
    except BadSample as bad:
        return None, f"the chat template refuses a question about an image: {bad}"
    if not np.array_equal(ours.input_ids, theirs.input_ids):
        return None, f"{type(processor).__name__} writes other tokens for an image than its known version"
    return fast, None


def _unknown(processor: ProcessorMixin) -> str | None:
    name, images = type(processor).__name__, getattr(processor, "image_processor", None)
    known = KNOWN.get(name)
    if known is None or not _is_transformers(processor):
        return f"{name} is not one of the known processors ({', '.join(KNOWN)})"
    if type(images).__name__ != known.image_processor or not _is_transformers(images):
        return f"{name} with {type(images).__name__}, known is {known.image_processor}"
    switches = {key: value for key, value in images.to_dict().items() if key.startswith("do_")}
    off = [key for key in NEEDED if not switches.pop(key, None)]
    on = [key for key, value in switches.items() if value and key not in WITHOUT_EFFECT]
    odd = [f"{key} = {getattr(images, key)}" for key in off + on]
    if images.resample is None or int(images.resample) not in RESAMPLE:
        odd.append(f"resample = {images.resample}")
    if not all(images.size.get(key) for key in known.size_keys):
        odd.append(f"size = {dict(images.size)}")
    return f"{type(images).__name__} with {', '.join(odd)}" if odd else None


def _is_transformers(part: Any) -> bool:
    return type(part).__module__.startswith("transformers.")  # not a subclass with its own ways


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
    """Rows of image tokens, each closed by a break token, the last by the end token."""
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


def _patches(processor: Any, image: ImageArray) -> dict[str, Tensor]:
    """Patches in the order in which the tower merges them, and their grid.

    Copied by whole lines of a patch, as one opaque value each.
    """
    side, merge = processor.image_processor.patch_size, processor.image_processor.merge_size
    rows, columns = image.shape[0] // side, image.shape[1] // side
    lines = np.ascontiguousarray(image).reshape(len(image), -1).view(f"V{3 * side}")
    merged = lines.reshape(rows // merge, merge, side, columns // merge, merge).transpose(0, 3, 1, 4, 2)
    patches = np.ascontiguousarray(merged).view(np.uint8).reshape(rows * columns, side * side * 3)
    grid = torch.from_numpy(np.array([[1, rows, columns]]))  # half the time of torch.tensor
    return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": grid}


_GRID = ("shortest_edge", "longest_edge")
_QWEN = Known("Qwen2VLImageProcessor", _GRID, _qwen_size, _grid_ids, _patches)
KNOWN = {  # processor class of transformers → what it does
    "Gemma3Processor": Known("Gemma3ImageProcessor", ("height", "width"), fixed_size, _gemma_ids, _whole),
    "PixtralProcessor": Known(
        "PixtralImageProcessor", ("longest_edge",), pixtral_size, _pixtral_ids, _whole_of_any_size
    ),
    "Glm4vProcessor": Known("Glm4vImageProcessor", _GRID, _glm_size, _grid_ids, _patches),
    "Qwen2VLProcessor": _QWEN,
    "Qwen2_5_VLProcessor": _QWEN,
    "Qwen3VLProcessor": _QWEN,
}
