"""What the known HF processors make of a conversation, without their detours.

Images and frames of videos stay bytes: they are decoded, resized by the kernel that the processors use, and
cut into patches or tiles once. `models.pixels` does the rest on the device; the result equals theirs to the
bit. Ids come from `data.encode.sizes`, which tokenizes the text without the tokens of images and videos.

A known processor is a line in KNOWN. Any other processor, or a known one with settings whose effect is not
known here, is called itself (`processors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.conversation.turns import refused_by_processor
from megatron_vlm.data.encode.marks import RenderedChat
from megatron_vlm.data.encode.sizes import ImageTokens, SizeEncoder
from megatron_vlm.data.encode.text import EncodedText, TextEncoder
from megatron_vlm.data.media import naflex, patches, tiles
from megatron_vlm.data.media.images import decode_pixels
from megatron_vlm.data.media.patches import RESAMPLE, Grid, resized
from megatron_vlm.data.media.videos import VideoPlan
from megatron_vlm.data.media_limits import fixed_size

NEEDED = ("do_resize", "do_rescale", "do_normalize")
# images are RGB already and padded in any case; frames of videos are chosen before
WITHOUT_EFFECT = ("do_convert_rgb", "do_pad", "do_sample_frames")

ImageArray = np.ndarray  # (H, W, 3) uint8


@dataclass(frozen=True)
class Known:
    """What a processor class of transformers does to images and videos with one class of image processor."""

    size_keys: tuple[str, ...]  # the keys of its `size`, if it reads that
    # (processor, height, width) → both after resizing; None: `tensors` resizes
    target: Callable[[Any, int, int], tuple[int, int]] | None
    # (processor, height and width after resizing) → ids; None: image tokens, as many as the processor counts
    image_ids: Callable[[Any, int, int], np.ndarray] | None
    # (processor, a resized image) → what is batched; without `target`
    # (processor, an image, whether it is its conversation's only one)
    tensors: Callable[..., dict[str, Tensor]]
    video_processor: str | None = None  # its class
    # (processor, frames, plan and grid of a video) → what is batched
    video: Callable[[Any, np.ndarray, VideoPlan, Grid], dict[str, Tensor]] = patches.of_video
    switches: tuple[str, ...] = NEEDED  # that must be on
    alike: tuple[str, ...] = ()  # settings in which image and video processor must agree


class KnownProcessor:
    """A `Processor` that does the work itself: ids, masks and spans equal the HF processor's, and so do the
    uint8 pixels once a `PixelNormalizer` has normalized them."""

    decode = staticmethod(decode_pixels)

    def __init__(self, processor: ProcessorMixin, text: TextEncoder):
        self._processor = processor
        self._known = known_of(processor)
        self.sizes = SizeEncoder(processor, text)

    def measure(
        self, prompt: RenderedChat, sizes: list[tuple[int, int]], plans: list[VideoPlan]
    ) -> EncodedText:
        return self.sizes(prompt, [self._image_tokens(size, len(sizes) == 1) for size in sizes], plans)

    def __call__(
        self,
        prompt: RenderedChat,
        images: Iterable[ImageArray],
        videos: list[tuple[np.ndarray, VideoPlan]],
        text: EncodedText | None = None,
    ) -> tuple[EncodedText, dict[str, Tensor]]:
        tensors, sizes = [], []
        for image in images:  # cut each image right after it is decoded: its pixels are still in the caches
            tensors.append(self._of_image(image, len(prompt.images) == 1))
            sizes.append(image.shape[1::-1])
        if text is None:
            text = self.measure(prompt, sizes, [plan for _, plan in videos])
        for video, grid in zip(videos, text.video_grids, strict=True):
            tensors.append(self._known.video(self._processor, *video, grid))
        spans = [*text.images, *text.videos]
        in_text = sorted(range(len(spans)), key=spans.__getitem__)  # frames may be among the images
        visual = GenericVisualInputs.cat([GenericVisualInputs(**tensors[item]) for item in in_text])
        return text, visual.as_model_kwargs() if visual else {}

    @refused_by_processor()
    def _of_image(self, image: ImageArray, alone: bool) -> dict[str, Tensor]:
        if self._known.target is None:
            return self._known.tensors(self._processor, image, alone)
        size = self._known.target(self._processor, *image.shape[:2])
        resample = self._processor.image_processor.resample
        return self._known.tensors(self._processor, resized(image, size, resample))

    @refused_by_processor()
    def _image_tokens(self, size: tuple[int, int], alone: bool) -> ImageTokens:
        if self._known.image_ids is None:
            return self.sizes.counted(size, alone)
        width, height = size
        height, width = self._known.target(self._processor, height, width)
        patches = (height // self.sizes.patch_size) * (width // self.sizes.patch_size)
        return self._known.image_ids(self._processor, height, width), patches


def known_of(processor: ProcessorMixin) -> Known | None:
    return KNOWN.get((type(processor).__name__, type(processor.image_processor).__name__))


def why_unknown(processor: ProcessorMixin) -> str | None:
    """Why a processor's work cannot be done here; None if it can."""
    name, known = type(processor).__name__, known_of(processor)
    wanted = [images for owner, images in KNOWN if owner == name]
    if not wanted or not _is_transformers(processor):
        names = dict.fromkeys(owner for owner, _ in KNOWN)
        return f"{name} is not one of the known processors ({', '.join(names)})"
    images, videos = processor.image_processor, getattr(processor, "video_processor", None)
    if known is None or not _is_transformers(images):
        return f"{name} with {type(images).__name__}, known is {' or '.join(wanted)}"
    parts = [images]
    if known.video_processor:
        parts.append(videos)
        if type(videos).__name__ != known.video_processor or not _is_transformers(videos):
            return f"{name} with {type(videos).__name__}, known is {known.video_processor}"
    for part in parts:
        if odd := _odd_settings(part, known):
            return f"{type(part).__name__} with {', '.join(odd)}"
    for key in known.alike:
        if (one := images.to_dict()[key]) != (other := videos.to_dict()[key]):
            return f"{name} with {key} = {one} for images and {other} for videos"
    return None


def _odd_settings(part: Any, known: Known) -> list[str]:
    switches = {key: value for key, value in part.to_dict().items() if key.startswith("do_")}
    off = [key for key in known.switches if not switches.pop(key, None)]
    on = [key for key, value in switches.items() if value and key not in WITHOUT_EFFECT]
    odd = [f"{key} = {getattr(part, key)}" for key in off + on]
    if part.resample is None or int(part.resample) not in RESAMPLE:
        odd.append(f"resample = {part.resample}")
    if known.size_keys and {key for key, side in dict(part.size).items() if side} != set(known.size_keys):
        odd.append(f"size = {dict(part.size)}")
    unused = ("pad_size",) if "do_center_crop" in known.switches else ("pad_size", "crop_size")
    odd += [f"{key} = {dict(size)}" for key in unused if (size := getattr(part, key, None))]
    canvases = getattr(part, "image_grid_pinpoints", None)
    if canvases and not tiles.fit(part.size, canvases):
        odd.append(f"size = {dict(part.size)} and image_grid_pinpoints = {canvases}")
    return odd


def _is_transformers(part: Any) -> bool:
    return type(part).__module__.startswith("transformers.")  # not a subclass with its own ways


_GRID, _SIDES = ("shortest_edge", "longest_edge"), ("height", "width")
_GLM = (_GRID, patches.glm_size, patches.grid_ids, patches.of_image)
_QWEN = (_GRID, patches.qwen_size, patches.grid_ids, patches.of_image)
_LIKE_IMAGES = ("size", "resample", "rescale_factor", "image_mean", "image_std")
KNOWN = {  # (processor class of transformers, class of its image processor) → what it does
    ("Gemma3Processor", "Gemma3ImageProcessor"): Known(_SIDES, fixed_size, patches.gemma3_ids, patches.whole),
    ("Gemma4Processor", "Gemma4ImageProcessor"): Known(
        (), patches.gemma4_size, None, naflex.patches, switches=("do_resize", "do_rescale")
    ),
    ("PixtralProcessor", "PixtralImageProcessor"): Known(
        ("longest_edge",), patches.pixtral_size, patches.pixtral_ids, patches.whole_of_any_size
    ),
    ("LlavaProcessor", "CLIPImageProcessor"): Known(
        ("shortest_edge",), tiles.size_before_crop, None, tiles.cropped, switches=(*NEEDED, "do_center_crop")
    ),
    ("LlavaProcessor", "SiglipImageProcessor"): Known(_SIDES, fixed_size, None, patches.whole),
    ("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor"): Known(
        _SIDES, None, None, tiles.onevision, "LlavaOnevisionVideoProcessor", tiles.frames_of_video
    ),
    ("InternVLProcessor", "GotOcr2ImageProcessor"): Known(
        *(_SIDES, None, None, tiles.internvl, "InternVLVideoProcessor", tiles.frames_as_images),
        alike=_LIKE_IMAGES,
    ),
    ("Lfm2VlProcessor", "Lfm2VlImageProcessor"): Known((), naflex.resized, naflex.image_ids, naflex.patches),
    ("Glm4vProcessor", "Glm4vImageProcessor"): Known(*_GLM, "Glm4vVideoProcessor"),
    ("Glm46VProcessor", "Glm46VImageProcessor"): Known(*_GLM, "Glm46VVideoProcessor"),
    ("Qwen2VLProcessor", "Qwen2VLImageProcessor"): Known(*_QWEN, "Qwen2VLVideoProcessor"),
    ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"): Known(
        *_QWEN, "Qwen2VLVideoProcessor", patches.of_timed_video
    ),
    ("Qwen3VLProcessor", "Qwen2VLImageProcessor"): Known(*_QWEN, "Qwen3VLVideoProcessor"),
}
