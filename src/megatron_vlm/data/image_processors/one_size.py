"""Images of one size, whatever size they had: SigLIP's towers have them resized, CLIP's cropped."""

import numpy as np
import torch
from torch import Tensor
from transformers.image_transforms import get_resize_output_image_size

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.base import SWITCHES, Frame, ImageProcessorSpec, resized
from megatron_vlm.data.media.images import MAX_DECODED_PIXELS


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
