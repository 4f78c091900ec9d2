"""Ids and pixels of a conversation and its media, from a known HF processor or from any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.data.conversation.chatml import BadSample
from megatron_vlm.data.encode.known import KnownProcessor, why_unknown
from megatron_vlm.data.encode.marks import RenderedChat
from megatron_vlm.data.encode.sizes import PROBE_MESSAGES, PROBE_SIZE, SizeEncoder
from megatron_vlm.data.encode.text import EncodedText, TextEncoder
from megatron_vlm.data.media import anyres, naflex, tiles
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.data.media.videos import VideoPlan
from megatron_vlm.data.media_limits import refuse_narrow


class Processor(Protocol):
    """Ids and pixels of a conversation; all give equal results once the device has normalized raw pixels."""

    sizes: SizeEncoder  # raises ValueError if an image's size does not tell its number of tokens
    decode: Callable[..., Any]  # (image file, most pixels, fewest pixels) → an image as `__call__` takes it

    def measure(
        self, prompt: RenderedChat, sizes: list[tuple[int, int]], plans: list[VideoPlan]
    ) -> EncodedText:
        """The text, from the (width, height) of images and the plans of videos. It equals the text of a call,
        or has equal length."""

    def __call__(
        self,
        prompt: RenderedChat,
        images: Iterable[Any],
        videos: list[tuple[np.ndarray, VideoPlan]],
        text: EncodedText | None = None,
    ) -> tuple[EncodedText, dict[str, Tensor]]:
        """The text, and the processor's other outputs by name. `text` is what `measure` gave, if called.

        Raises BadSample when the processor refuses what it gets.
        """


class HFProcessor:
    """Any Hugging Face processor, called once per conversation."""

    decode = staticmethod(decode_image)

    def __init__(self, processor: ProcessorMixin, text: TextEncoder):
        self._processor, self._text = processor, text
        if naflex.is_naflex(processor):
            images = processor.image_processor
            refuse_narrow(images.min_image_tokens, images.max_image_tokens)

    @functools.cached_property
    def sizes(self) -> SizeEncoder:
        try:
            return SizeEncoder(self._processor, self._text)
        except BadSample as bad:
            raise ValueError(
                f"{type(self._processor).__name__}: a question about an image is refused ({bad}), and "
                "packing needs its tokens; correct processor or chat template, or use data.packing=none."
            ) from bad

    def measure(self, prompt, sizes, plans) -> EncodedText:
        return self.sizes(prompt, [self.sizes.counted(size, len(sizes) == 1) for size in sizes], plans)

    def __call__(self, prompt, images, videos, text=None) -> tuple[EncodedText, dict[str, Tensor]]:
        images = list(images)
        for image in images:
            if naflex.is_naflex(self._processor):
                naflex.resized(self._processor, image.height, image.width)
            if anyres.is_anyres(self._processor) and len(images) > 1:
                tiles.square_of(image.height, image.width)
        encoded, outputs = self._text(prompt, images, videos)
        return encoded, naflex.without_padding(outputs)


def processor_for(processor: ProcessorMixin, text: TextEncoder) -> tuple[Processor, str | None]:
    """The fastest correct one, and why the HF processor itself is called; None if it is not."""
    theirs = HFProcessor(processor, text)
    if reason := why_unknown(processor):
        return theirs, reason
    try:
        ours = KnownProcessor(processor, text)
        prompt = text.chat(PROBE_MESSAGES, None, images=1)
        expected, _ = text(prompt, [Image.new("RGB", PROBE_SIZE)])
        found, _ = ours(prompt, [np.zeros((*PROBE_SIZE[::-1], 3), np.uint8)], [])
    except BadSample as bad:
        return theirs, f"a question about an image is refused: {bad}"
    except ValueError as error:
        return theirs, str(error)
    if not np.array_equal(found.input_ids, expected.input_ids):
        return theirs, f"{type(processor).__name__} writes other tokens for an image than its known version"
    return ours, None
