"""From a conversation and its media to ids and pixels, as a known or as any HF processor makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.encode.known import KnownProcessor, why_unknown
from megatron_vlm.data.encode.marks import RenderedChat
from megatron_vlm.data.encode.sizes import PROBE_MESSAGES, PROBE_SIZE, SizeEncoder
from megatron_vlm.data.encode.text import EncodedText, TextEncoder
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.data.media.videos import VideoPlan


class Processor(Protocol):
    """All give equal results, once the device has normalized raw pixels."""

    sizes: SizeEncoder  # raises ValueError where an image's tokens cannot be told from its size
    decode: Callable[..., Any]  # (an image file, most pixels, fewest pixels) → what a call takes as image

    def measure(
        self, prompt: RenderedChat, sizes: list[tuple[int, int]], plans: list[VideoPlan]
    ) -> EncodedText:
        """The text, from images' (width, height) and without the frames of videos: equal to a call's, or of
        equal length."""

    def __call__(
        self,
        prompt: RenderedChat,
        images: Iterable[Any],
        videos: list[tuple[np.ndarray, VideoPlan]],
        text: EncodedText | None = None,
    ) -> tuple[EncodedText, dict[str, Tensor]]:
        """The text, and the processor's other outputs by name. `text` is what `measure` gave, where it did.

        Raises BadSample when the processor refuses what it gets.
        """


class HFProcessor:
    """Any Hugging Face processor, called once for a conversation."""

    decode = staticmethod(decode_image)

    def __init__(self, processor: ProcessorMixin, text: TextEncoder):
        self._processor, self._text = processor, text

    @functools.cached_property
    def sizes(self) -> SizeEncoder:
        return SizeEncoder(self._processor, self._text)

    def measure(self, prompt, sizes, plans) -> EncodedText:
        return self.sizes(prompt, [self.sizes.counted(size) for size in sizes], plans)

    def __call__(self, prompt, images, videos, text=None) -> tuple[EncodedText, dict[str, Tensor]]:
        return self._text(prompt, list(images), videos)


def processor_for(processor: ProcessorMixin, text: TextEncoder) -> tuple[Processor, str | None]:
    """The fastest that is right, and why it is not a known processor's; None where it is."""
    theirs = HFProcessor(processor, text)
    if reason := why_unknown(processor):
        return theirs, reason
    try:
        ours = KnownProcessor(processor, text)
        prompt = text.chat(PROBE_MESSAGES, None, images=1)
        expected, _ = text(prompt, [Image.new("RGB", PROBE_SIZE)])
        found, _ = ours(prompt, [np.zeros((*PROBE_SIZE[::-1], 3), np.uint8)], [])
    except BadSample as bad:
        return theirs, f"the chat template refuses a question about an image: {bad}"
    if not np.array_equal(found.input_ids, expected.input_ids):
        return theirs, f"{type(processor).__name__} writes other tokens for an image than its known version"
    return ours, None
