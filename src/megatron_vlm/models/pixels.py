"""The arithmetic of the HF image processors, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.batch import is_raw


class PixelNormalizer(nn.Module):
    """Raw `pixel_values` (see `megatron_vlm.batch`) → what the image processor would have made, to the bit.

    image_processor   of the checkpoint; without `image_mean`, `image_std` and `rescale_factor`, raw pixels
                      raise ValueError, as they do with None
    """

    def __init__(self, image_processor: Any | None):
        super().__init__()
        names = ("image_mean", "image_std", "rescale_factor")
        settings = [getattr(image_processor, name, None) for name in names]
        self.knows = None not in settings
        if self.knows:
            mean, std, factor = settings
            # as transformers joins them: image_processing_backends.py, _fuse_mean_std_and_rescale_factor
            self.register_buffer("mean", torch.tensor(mean) * (1.0 / factor), persistent=False)
            self.register_buffer("std", torch.tensor(std) * (1.0 / factor), persistent=False)
        self.frames = getattr(image_processor, "temporal_patch_size", 1)

    def forward(self, visual: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same fields, raw pixels made ready in `dtype`; pixels that are ready stay as they are.

        Starts work on the device and never waits for it.
        """
        pixels = visual.get("pixel_values")
        if pixels is None or not is_raw(pixels):
            return visual
        if not self.knows:
            raise ValueError(
                "uint8 pixel_values, but the model was built without the checkpoint's image processor, which "
                "says how to normalize them; pass it to build_model."
            )
        ready = self._images if pixels.dim() == 4 else self._patches
        return visual | {"pixel_values": ready(pixels, dtype, visual.get("image_sizes"))}

    def _images(self, pixels_NHWC: Tensor, dtype: torch.dtype, sizes: Tensor | None) -> Tensor:
        ready = self._normalized(pixels_NHWC, dtype).permute(0, 3, 1, 2).contiguous()
        for image, (height, width) in zip(ready, () if sizes is None else sizes.tolist(), strict=False):
            image[:, height:] = 0  # padding is black before, and zero after the processor's arithmetic
            image[:, :, width:] = 0
        return ready

    def _patches(self, pixels_PF: Tensor, dtype: torch.dtype, sizes: None) -> Tensor:
        """Each patch once for every moment that the tower joins."""
        ready = self._normalized(pixels_PF.unflatten(-1, (-1, len(self.mean))), dtype).transpose(1, 2)
        return ready[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)

    def _normalized(self, colours_last: Tensor, dtype: torch.dtype) -> Tensor:
        return colours_last.float().sub_(self.mean).div_(self.std).to(dtype)
