"""The arithmetic of the HF image and video processors, on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.batch import is_raw
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import ImageProcessorSpec


class PixelNormalizer(nn.Module):
    """Raw pixels (see `megatron_vlm.batch`) → what the HF processor would have made, to the bit.

    processor   the checkpoint's. Raw pixels raise ValueError if it is None, or if its image or video
                processor lacks `image_mean`, `image_std` or `rescale_factor`
    """

    def __init__(self, processor: Any | None):
        super().__init__()
        images, videos = (getattr(processor, name, None) for name in ("image_processor", "video_processor"))
        spec = ImageProcessorSpec if processor is None else get_image_spec(processor)
        self._pads_to_largest = spec.pads_to_largest
        # raw patches of videos hold all moments already
        self.images = _Normalizer(images, spec.colours_last, getattr(images, "temporal_patch_size", 1))
        self.videos = _Normalizer(videos, spec.colours_last)

    def forward(self, visual: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same fields, with raw pixels normalized to `dtype`, or only scaled; others stay as they are.

        Starts work on the device and never waits for it.
        """
        fields = {"pixel_values": self.images, "pixel_values_videos": self.videos}
        raw = [name for name in fields if name in visual and is_raw(visual[name])]
        if unknown := [name for name in raw if not fields[name].knows]:
            raise ValueError(
                f"uint8 {' and '.join(unknown)}, but the model was built without the checkpoint's processor, "
                "which says how to normalize them; pass it to build_model."
            )
        sizes = visual["image_sizes"] if raw and self._pads_to_largest else None
        return visual | {name: fields[name](visual[name], dtype, sizes) for name in raw}


class _Normalizer(nn.Module):
    """Normalizes raw pixels of one kind, and repeats the moment in each patch `repeats` times."""

    def __init__(self, part: Any | None, colours_last: bool, repeats: int = 1):
        super().__init__()
        settings = [getattr(part, name, None) for name in ("image_mean", "image_std", "rescale_factor")]
        self.knows, self.repeats = None not in settings, repeats
        self.colours_at = 2 if colours_last else 1  # in the patches that the tower takes
        self.only_scaled = not getattr(part, "do_normalize", True)  # Gemma 4's tower does the rest, in fp32
        if self.knows:
            mean, std, self.factor = settings
            # fused as in transformers: image_processing_backends.py, _fuse_mean_std_and_rescale_factor
            self.register_buffer("mean", torch.tensor(mean) * (1.0 / self.factor), persistent=False)
            self.register_buffer("std", torch.tensor(std) * (1.0 / self.factor), persistent=False)

    def forward(self, pixels: Tensor, dtype: torch.dtype, sizes: Tensor | None) -> Tensor:
        return self._images(pixels, dtype, sizes) if pixels.dim() == 4 else self._patches(pixels, dtype)

    def _images(self, pixels_NHWC: Tensor, dtype: torch.dtype, sizes: Tensor | None) -> Tensor:
        ready = self._normalized(pixels_NHWC, dtype).permute(0, 3, 1, 2).contiguous()
        for image, (height, width) in zip(ready, () if sizes is None else sizes.tolist(), strict=False):
            image[:, height:] = 0  # padding is black in raw pixels, but zero in what the processor returns
            image[:, :, width:] = 0
        return ready

    def _patches(self, pixels_PF: Tensor, dtype: torch.dtype) -> Tensor:
        ready = self._normalized(pixels_PF.unflatten(-1, (-1, len(self.mean))), dtype)
        ready = ready.transpose(self.colours_at, 2)
        return ready[:, :, None].expand(-1, -1, self.repeats, -1).flatten(1)

    def _normalized(self, colours_last: Tensor, dtype: torch.dtype) -> Tensor:
        if self.only_scaled:
            return colours_last.float().mul_(self.factor)
        return colours_last.float().sub_(self.mean).div_(self.std).to(dtype)
