"""The spec of an image processor: how it counts, resizes, cuts, lays out and shows images.

A spec is chosen by the image processor, whoever wrote that (`get_image_spec`). Whether the package can do a
processor's work without calling it is another question (`explain_unknown`).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv
from transformers import ProcessorMixin
from transformers.image_transforms import get_resize_output_image_size

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.media.images import MAX_DECODED_PIXELS
from megatron_vlm.data.media.videos import VideoPlan

Grid = tuple[int, int, int]  # temporal patches, rows and columns of raw patches
RESAMPLE = {2: tv.InterpolationMode.BILINEAR, 3: tv.InterpolationMode.BICUBIC}  # Pillow's numbers
SWITCHES = ("do_resize", "do_rescale", "do_normalize")
# images are RGB already and padded in any case; frames of videos are chosen before
WITHOUT_EFFECT = ("do_convert_rgb", "do_pad", "do_sample_frames")
PROBE_SIZE = (56, 56)
SIDES = (28, 112, 448, 1792, 7168)  # of squares that show whether an image's pixels count
PATCH_SIZE = 14  # pixels along a patch's side if nothing tells: SigLIP's


class Frame(NamedTuple):
    """A picture that the model sees of an image as a whole, and where the image lies in it, in its pixels.

    Of a crop, the image is larger than the picture, and its edges lie outside; around it may be padding.
    """

    width: int  # of the picture
    height: int
    left: float  # of the image, scaled, in the picture
    top: float
    image_width: float
    image_height: float


class ImageProcessorSpec:
    """How a processor treats images and videos.

    Sizes are (height, width); settings are read when needed.

    `count` and `of_plan` need sizes alone. `ids`, `tensors` and `of_video` stand in for a processor that is
    known; `refuse`, `arrange` and `unpad` are needed around a call of any other. They raise BadSample for an
    image or a video that the processor cannot take. This class itself is for a processor without a spec.
    """

    # the image processor's setting, or side of its `size`, that marks this spec if no spec before it has one
    marker_setting: ClassVar[str] = ""
    # (class of a processor, class of its image processor), both of transformers, which need not be called
    # -> the class of its video processor; None if it takes no videos
    known_processors: ClassVar[Mapping[tuple[str, str], str | None]] = {}
    size_keys: ClassVar[tuple[str, ...]] = ()  # of `size` in known processors, if it is read
    switches: ClassVar[tuple[str, ...]] = SWITCHES  # that must be on in known processors
    optional_switches: ClassVar[tuple[str, ...]] = ()  # switches that may be on or off in them
    resamples: ClassVar[tuple[int, ...]] = tuple(RESAMPLE)  # that they may ask for
    unused: ClassVar[tuple[str, ...]] = ("pad_size", "crop_size")  # sizes that must not be set in them
    overview_index: ClassVar[int] = 0  # which of an image's pictures shows all of it
    # in which their image and video processors must agree
    shared_settings: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[str] = ""  # the setting that makes several images of one, which nothing counts
    writes_by_size: ClassVar[bool] = False  # of an image more than a run of its tokens, see `of_size`
    pads_to_largest: ClassVar[bool] = False  # images of a batch, right and bottom, to `image_sizes`
    colours_last: ClassVar[bool] = False  # in the patches that the tower takes

    def __init__(self, processor: ProcessorMixin):
        self.processor, self.images = processor, processor.image_processor

    @functools.cached_property
    def patch_size(self) -> int:
        """Pixels along the side of a raw patch."""
        sides = (getattr(part, "patch_size", None) for part in (self.processor, self.images))
        return next(filter(None, sides), PATCH_SIZE)

    # ---- from sizes alone

    def check_counts(self) -> None:
        """Raises ValueError if the tokens of an image cannot be told from its size."""
        if not self.marker_setting or self.processor_counts(PROBE_SIZE[0], PROBE_SIZE[1]) is None:
            reason, remedy = "cannot tell the tokens of an image from its size", "use"
        elif getattr(self.images, self.splits, None):
            reason = f"with {self.splits} images give tokens that their size does not tell"
            remedy = "turn it off or use"
        else:
            return
        name = type(self.processor).__name__
        raise ValueError(f"{name}: {reason}, as packing needs; {remedy} data.packing=none.")

    @functools.cached_property
    def makes_one_size(self) -> bool:
        """Whether limits on an image's pixels have no effect: only its aspect counts."""
        return bool(self.marker_setting) and len(self._results(SIDES)) == 1

    def _results(self, sides: Iterable[int]) -> set[tuple]:
        """Return what squares of these sides become: size, tokens and pieces."""
        return {(self.target(side, side), self.processor_counts(side, side)) for side in sides}

    def check_sizes(self, min_pixels: int, max_pixels: int) -> None:
        """Raises ConfigError if images of `least` and of `most` pixels are resized to one size."""
        results = (
            self._results(map(math.isqrt, (min_pixels, max_pixels)))
            if self.marker_setting
            else {("unknown", None)}
        )
        if len(results) == 1:
            limits = f"data.min_pixels {min_pixels} and of data.max_pixels {max_pixels}"
            raise ConfigError(
                f"data.resize_jitter: {type(self.processor).__name__} makes images of {limits} one size "
                f"({results.pop()[0]}); drop it, or move the two apart."
            )

    def processor_counts(self, height: int, width: int, **options: Any) -> tuple[int, int] | None:
        """The processor's own numbers of an image's tokens and pieces; None if it counts none."""
        with suppress(AttributeError, TypeError):
            numbers = self.processor._get_num_multimodal_tokens([(height, width)], **options)
            return numbers["num_image_tokens"][0], numbers["num_image_patches"][0]
        return None

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        """The numbers of tokens and raw patches of an image, which is its conversation's only one or not."""
        return self.processor_counts(height, width)

    def of_size(self, height: int, width: int) -> tuple[str, int]:
        """The text that the processor writes for an image, and the image's number of raw patches."""
        raise NotImplementedError

    def label(self, number: int, token: str) -> str:
        """The text that numbers a conversation's image or video, before the text of `of_size` or `of_plan`.

        `number` counts from 0; `token` stands for the image or video in the template.
        """
        return ""

    def of_plan(self, plan: VideoPlan) -> tuple[str, Grid]:
        """The text that the processor writes for a video, and the video's grid."""
        raise NotImplementedError

    # ---- around a call of the processor

    def check_settings(self) -> None:
        """Raises ConfigError for settings with which the processor fails on ordinary images."""

    def refuse(self, height: int, width: int, alone: bool) -> None:
        """Raises BadSample for an image on which the processor fails in ways of its own."""

    def arrange(self, images: Sequence[Any]) -> Sequence[Any]:
        """The images of one conversation as `apply_chat_template` hands them to the processor."""
        return images

    def unpad(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The processor's outputs for one conversation as the model takes them: without padding."""
        return dict(outputs)

    # ---- in place of a known processor

    def odd_settings(self, part: Any) -> list[str]:
        """The settings of the image or video processor whose effect is not known here."""
        switches = {key: value for key, value in part.to_dict().items() if key.startswith("do_")}
        off = [key for key in self.switches if not switches.pop(key, None)]
        on = [
            key
            for key, value in switches.items()
            if value and key not in WITHOUT_EFFECT + self.optional_switches
        ]
        odd = [f"{key} = {getattr(part, key)}" for key in off + on]
        if part.resample is None or int(part.resample) not in self.resamples:
            odd.append(f"resample = {part.resample}")
        if self.size_keys and {key for key, side in dict(part.size).items() if side} != set(self.size_keys):
            odd.append(f"size = {dict(part.size)}")
        return odd + [f"{key} = {dict(size)}" for key in self.unused if (size := getattr(part, key, None))]

    def ids(self, height: int, width: int, alone: bool, image_token: int) -> tuple[np.ndarray, int]:
        """An image's ids without its begin and end tokens, in their order, and its number of raw patches."""
        tokens, patches = self.count(height, width, alone)
        return np.full(tokens, image_token), patches

    def target(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image is resized to."""
        raise NotImplementedError

    def frame(self, width: int, height: int, alone: bool) -> Frame:
        """The picture in which coordinates of an image of that size are counted.

        Raises BadSample, and as the processor does for an image that it cannot take.
        """
        if not self.marker_setting:
            raise BadSample(
                "processor_error",
                f"nobody knows what {type(self.images).__name__} cuts of an image, so where a box is",
            )
        height, width = self.target(height, width)
        return Frame(width, height, 0, 0, width, height)

    def fit(self, image: np.ndarray) -> np.ndarray:
        """An image (H, W, 3) in its `target` size."""
        return resized(image, self.target(*image.shape[:2]), self.images.resample)

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        """The tensors of an image (H, W, 3) in a batch; `alone`: its conversation's only one."""
        raise NotImplementedError

    def of_video(self, frames: np.ndarray, plan: VideoPlan, grid: Grid) -> dict[str, Tensor]:
        """The tensors of a video's frames (T, H, W, 3) in a batch, with the grid that `of_plan` gave."""
        raise NotImplementedError

    # ---- from what was made either way

    def patches_of(self, visual: GenericVisualInputs) -> int:
        """The number of raw patches, without padding."""
        count = 0
        for pixels in (visual.pixel_values, visual.pixel_values_videos):
            if pixels is not None:
                height, width = pixels.shape[1:3] if is_raw(pixels) else pixels.shape[2:]
                count += len(pixels) * (height // self.patch_size) * (width // self.patch_size)
        return count

    def frames(self, item: GenericVisualInputs) -> Tensor:
        """(T, C, H, W) the pixels of one image or video, as the model sees them."""
        pixels = item.pixel_values_videos if item.pixel_values is None else item.pixel_values
        return pixels.permute(0, 3, 1, 2) if is_raw(pixels) else pixels


def set_image_options(processor: ProcessorMixin, options: Mapping[str, Any]) -> None:
    """Let each call of a processor have these options of its image processor.

    A processor's class may have values that take the place of its image processor's, so `image_options` are
    handed to each call. Raises ConfigError for an option that the image processor does not have.
    """
    name = type(processor.image_processor).__name__
    if unknown := [key for key in options if not hasattr(processor.image_processor, key)]:
        raise ConfigError(f"data.image_processor_kwargs.{unknown[0]}: {name} has no such option; drop it.")
    for key, value in options.items():
        setattr(processor.image_processor, key, value)
    processor.image_options = dict(options)


def image_options(processor: ProcessorMixin) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of a call with images."""
    options = getattr(processor, "image_options", None)
    return {"images_kwargs": options} if options else {}


def resized(pixels: np.ndarray, size: tuple[int, int], resample: Any) -> np.ndarray:
    """An image or frames, (..., H, W, 3) uint8, resized to `size`."""
    if tuple(size) == pixels.shape[-3:-1]:
        return pixels
    # colours stay last in memory: more than twice as fast as colour by colour, with equal results
    colours_first = torch.from_numpy(pixels).movedim(-1, -3)
    new = tv.resize(colours_first, list(size), RESAMPLE[int(resample)], antialias=True)
    return new.movedim(-3, -1).numpy()


class OneSize(ImageProcessorSpec):
    """The images of Gemma 3, and of LLaVA with SigLIP."""

    marker_setting = "height"
    known_processors = {
        ("Gemma3Processor", "Gemma3ImageProcessor"): None,
        ("LlavaProcessor", "SiglipImageProcessor"): None,
    }
    size_keys = ("height", "width")
    splits = "do_pan_and_scan"

    @property
    def size(self) -> tuple[int, int]:
        """The size of all images, or of all tiles of images."""
        return self.images.size["height"], self.images.size["width"]

    def target(self, height: int, width: int) -> tuple[int, int]:
        return self.size

    def processor_counts(self, height: int, width: int) -> tuple[int, int] | None:
        # LLaVA's counts the tokens of a crop, even where the image processor does not crop
        return super().processor_counts(
            height, width, crop_size={"height": self.size[0], "width": self.size[1]}
        )

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        tokens, pieces = self.processor_counts(height, width)
        return tokens, pieces * (self.size[0] // self.patch_size) * (self.size[1] // self.patch_size)

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        return {"pixel_values": torch.from_numpy(resized(image, self.size, self.images.resample))[None]}


class Cropped(OneSize):
    """The images of LLaVA with CLIP: the shorter side gets a set length, and the middle is taken."""

    marker_setting = "do_center_crop"
    known_processors = {("LlavaProcessor", "CLIPImageProcessor"): None}
    size_keys = ("shortest_edge",)
    switches = (*SWITCHES, "do_center_crop")
    unused = ("pad_size",)

    @property
    def size(self) -> tuple[int, int]:
        return self.images.crop_size["height"], self.images.crop_size["width"]

    def refuse(self, height: int, width: int, alone: bool) -> None:
        high, wide = self.target(height, width)
        if high * wide > MAX_DECODED_PIXELS:
            detail = f"{width}x{height} is resized to {wide}x{high} by its processor"
            raise BadSample("image_too_large", detail)

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        self.refuse(height, width, alone)
        return super().count(height, width, alone)

    def target(self, height: int, width: int) -> tuple[int, int]:
        return get_resize_output_image_size(
            np.broadcast_to(0, (height, width, 3)),  # it looks at the shape alone
            self.images.size["shortest_edge"],
            default_to_square=False,
            input_data_format="channels_last",
        )

    def frame(self, width: int, height: int, alone: bool) -> Frame:
        height, width = self.target(height, width)
        x, y = (_before(outer, inner) for outer, inner in zip(self.size[::-1], (width, height), strict=True))
        return Frame(*self.size[::-1], x, y, width, height)

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        self.refuse(*image.shape[:2], alone)
        # black is around the middle where the image is smaller
        colours_first = torch.from_numpy(self.fit(image)).movedim(-1, 0)
        middle = self.images.center_crop(colours_first, self.images.crop_size)
        return {"pixel_values": middle.movedim(0, -1).contiguous()[None]}


def _before(outer: int, inner: int) -> int:
    """Where a middle begins, as transformers' `center_crop` rounds it; negative if something is cut off."""
    return (outer - inner) // 2 if outer > inner else -((inner - outer) // 2)
