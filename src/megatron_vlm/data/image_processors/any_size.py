"""Images of any size in whole patches, padded beside one another: Pixtral's, of Mistral 3 and others."""

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_utils import get_size_dict
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.image_processors.base import ImageProcessorSpec


class AnySize(ImageProcessorSpec):
    """Rows of image tokens: a break token closes each row, the end token the last one."""

    marker_setting = "longest_edge"
    known_processors = {("PixtralProcessor", "PixtralImageProcessor"): None}
    size_keys = ("longest_edge",)
    pads_to_largest = True

    @property
    def token_side(self) -> int:
        """Pixels along the side of what one image token stands for."""
        return self.processor.patch_size * self.processor.spatial_merge_size

    @property
    def multiple(self) -> int:
        """Each side of a resized image is a multiple of so many pixels."""
        return self.token_side

    def target(self, height: int, width: int) -> tuple[int, int]:
        """The size of an image that is scaled to fit a square and rounded up to whole multiples."""
        longest, side = self.images.size["longest_edge"], self.multiple
        shape_only = np.broadcast_to(np.uint8(0), (3, height, width))
        return get_resize_output_image_size(shape_only, size=(longest, longest), patch_size=(side, side))

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        # the processor takes 1 or 3 rows for channels; 4 rows are one row of patches, too
        tokens, _ = self.processor_counts(4 if height in (1, 3) else height, width)
        height, width = self.target(height, width)
        return tokens, (height // self.patch_size) * (width // self.patch_size)

    def ids(self, height: int, width: int, alone: bool, image_token: int) -> tuple[np.ndarray, int]:
        height, width = self.target(height, width)
        ids = np.full((height // self.token_side, width // self.token_side + 1), image_token)
        ids[:, -1] = self.processor.image_break_token_id
        ids[-1, -1] = self.processor.image_end_token_id
        return ids.ravel(), (height // self.patch_size) * (width // self.patch_size)

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        pixels = self.fit(image)
        sizes = torch.from_numpy(np.array([pixels.shape[:2]]))
        return {"pixel_values": torch.from_numpy(pixels)[None], "image_sizes": sizes}

    def patches_of(self, visual: GenericVisualInputs) -> int:
        return int(visual.image_sizes.prod(-1).sum()) // self.patch_size**2

    def frames(self, item: GenericVisualInputs) -> Tensor:
        height, width = item.image_sizes[0].tolist()
        return super().frames(item)[..., :height, :width]


class Unbroken(AnySize):
    """LightOnOCR's: rows without break and end tokens. Images need not be of whole image tokens: the tower's
    merger leaves out the patches that make none."""

    known_processors = {("LightOnOcrProcessor", "PixtralImageProcessor"): None}

    @property
    def multiple(self) -> int:
        return get_size_dict(self.images.patch_size)["height"]

    def count(self, height: int, width: int, alone: bool) -> tuple[int, int]:
        self.refuse(height, width, alone)
        height, width = self.target(height, width)
        tokens = (height // self.token_side) * (width // self.token_side)
        return tokens, (height // self.patch_size) * (width // self.patch_size)

    ids = ImageProcessorSpec.ids

    def refuse(self, height: int, width: int, alone: bool) -> None:
        if min(self.target(height, width)) < self.token_side:
            raise BadSample("processor_error", f"image of {width} x {height} has no whole image token")
