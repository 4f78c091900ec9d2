"""The exact length of a sample's encoding from its text and the sizes of its images, without their pixels.

The processor is asked once, with a small image, what it writes for an image and how many of the tokens it
counts; from then on its own count of tokens for an image size (`_get_num_multimodal_tokens`) is added to the
tokens of a text in which every image is written as short as possible.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.spans import (
    IMAGE_START,
    IMAGE_STOP,
    Span,
    SpanProcessor,
    placeholder_tokens,
    video_options,
)
from megatron_vlm.data.videos import VideoPlan

# Pixels along the side of a tower's patch where the processor does not say: that of SigLIP, Gemma3's tower.
PATCH_SIZE = 14
PROBE_SIZE = (56, 56)
MARKED_IMAGE = re.compile(f"{IMAGE_START}.*?{IMAGE_STOP}", re.DOTALL)


@dataclass
class Layout:
    """What the encoding of a conversation will look like."""

    reply_mask: np.ndarray  # (T,) bool
    images: list[Span]
    videos: list[Span]
    image_patches: list[int]  # raw patches of each image
    video_patches: list[int]

    def __len__(self) -> int:
        return len(self.reply_mask)


class Measure:
    """Called as `SpanProcessor`, with the sizes (width, height) of the images and the plans of the videos
    instead of their pixels.

    Raises ValueError when the processor cannot tell how many tokens an image of a given size becomes.
    """

    def __init__(self, processor: ProcessorMixin, encode_text: SpanProcessor):
        if not hasattr(processor, "_get_num_multimodal_tokens"):
            raise ValueError(
                f"{type(processor).__name__} cannot tell the tokens of an image from its size, as packing "
                "needs; use data.packing=none."
            )
        if getattr(processor.image_processor, "do_pan_and_scan", None):
            raise ValueError(
                f"{type(processor).__name__}: with do_pan_and_scan images give tokens that their size does "
                "not tell, as packing needs; turn it off or use data.packing=none."
            )
        self._processor, self._encode_text = processor, encode_text
        self._patch_size = getattr(processor, "patch_size", PATCH_SIZE)
        self._short_image, self._counted = self._probe()

    def __call__(
        self,
        messages: list[dict],
        tools: list[dict] | None,
        sizes: list[tuple[int, int]],
        plans: list[VideoPlan] | None = None,
    ) -> Layout:
        """Raises BadSample when the template or the processor refuses the conversation."""
        plans = plans or []
        marked, options = self._encode_text.marked(messages, tools, len(sizes), len(plans))
        videos = [self._video(plan) for plan in plans]
        marked = self._write_videos(marked, [text for text, _, _ in videos])
        reply_mask, image_spans, video_spans = self._tokenize(marked, options, self._short_image)
        tokens, image_patches = self._tokens_and_patches(sizes)
        added = [count - self._counted for count in tokens] + [count for _, count, _ in videos]
        reply_mask, spans = _grown(reply_mask, [*image_spans, *video_spans], added)
        images, patches = len(sizes), [count for _, _, count in videos]
        return Layout(reply_mask, spans[:images], spans[images:], image_patches, patches)

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The raw patches in the tensors of an encoded sample, padding aside."""
        if visual_inputs is None:
            return 0
        grids = (visual_inputs.image_grid_thw, visual_inputs.video_grid_thw)
        if any(grid is not None for grid in grids):
            return sum(int(grid.prod(-1).sum()) for grid in grids if grid is not None)
        if visual_inputs.image_sizes is not None:
            return int(visual_inputs.image_sizes.prod(-1).sum()) // self._patch_size**2
        images, _, height, width = visual_inputs.pixel_values.shape
        return images * (height // self._patch_size) * (width // self._patch_size)

    def _probe(self) -> tuple[str, int]:
        """The shortest text of an image, marks included, and how many tokens of it the processor counts."""
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        ]
        expanded = len(self._encode_text(messages, None, [Image.new("RGB", PROBE_SIZE)]).input_ids)
        short_image = MARKED_IMAGE.search(self._encode_text.marked_tokenizer.text)[0]
        for token in placeholder_tokens(self._processor):
            short_image = re.sub(f"(?:{re.escape(token)})+", lambda _, token=token: token, short_image)
        marked, options = self._encode_text.marked(messages, None, images=1)
        reply_mask, _, _ = self._tokenize(marked, options, short_image)
        (told,), _ = self._tokens_and_patches([PROBE_SIZE])
        return short_image, told - (expanded - len(reply_mask))

    def _tokenize(
        self, marked: str, options: dict, short_image: str
    ) -> tuple[np.ndarray, list[Span], list[Span]]:
        tokenizer = self._encode_text.marked_tokenizer
        tokenizer(MARKED_IMAGE.sub(lambda _: short_image, marked), **options)
        return tokenizer.reply_mask, tokenizer.images, tokenizer.videos

    def _video(self, plan: VideoPlan) -> tuple[str, int, int]:
        """(its text with one token for each run of equal ones, how many tokens more it has, raw patches).

        The video processor works on frames without memory, and so applies its own rules to their shape.
        """
        width, height = plan.size
        frames = torch.empty((len(plan.times), 3, height, width), dtype=torch.uint8, device="meta")
        options = video_options([plan]) | {"input_data_format": "channels_first", "return_metadata": True}
        try:
            outputs = self._processor.video_processor([frames], return_tensors="pt", **options)
            text = self._processor.replace_video_token(outputs, 0)
        except ValueError as error:
            raise BadSample("processor_error", str(error)) from error
        added = 0
        for token in {self._processor.video_token, *placeholder_tokens(self._processor)}:
            short = re.sub(f"(?:{re.escape(token)})+", lambda _, token=token: token, text)
            added += (len(text) - len(short)) // len(token)
            text = short
        return text, added, int(outputs["video_grid_thw"].prod())

    def _write_videos(self, marked: str, texts: list[str]) -> str:
        """`marked` with what the processor writes for each video in place of its placeholder."""
        if not texts:
            return marked
        pieces = marked.split(self._processor.video_token)  # which record text cannot hold
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(pieces, texts, fillvalue="")))

    def _tokens_and_patches(self, sizes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        if not sizes:
            return [], []
        has_grids = hasattr(self._processor.image_processor, "merge_size")
        if not has_grids:  # Pixtral's takes 1 or 3 rows for channels; as 4 rows, they are one row of patches
            sizes = [(width, 4 if height in (1, 3) else height) for width, height in sizes]
        try:
            told = self._processor._get_num_multimodal_tokens([(height, width) for width, height in sizes])
        except ValueError as error:
            raise BadSample("processor_error", str(error)) from error
        tokens, patches = told["num_image_tokens"], told["num_image_patches"]
        if not has_grids:  # these count each image as one patch
            patches = [self._patches(*size) for size in sizes]
        return list(tokens), list(patches)

    def _patches(self, width: int, height: int) -> int:
        """Of an image resized to one size (Gemma3), or into a square and up to whole patches (Pixtral)."""
        size = self._processor.image_processor.size
        if size.get("height"):
            return (size["height"] // self._patch_size) * (size["width"] // self._patch_size)
        merged = self._patch_size * self._processor.spatial_merge_size
        height, width = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (height, width, 3)),  # it wants an image, and looks at its shape
            size=(size["longest_edge"], size["longest_edge"]),
            patch_size=(merged, merged),
        )
        return (height // self._patch_size) * (width // self._patch_size)


def _grown(reply_mask: np.ndarray, spans: list[Span], added: list[int]) -> tuple[np.ndarray, list[Span]]:
    """Mask and spans once each span has so many tokens more; none of a span is of a reply."""
    pieces, grown, read, written = [], list(spans), 0, 0
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[index]
        media = np.zeros(stop - start + added[index], bool)
        pieces += [reply_mask[read:start], media]
        first = written + start - read
        read, written = stop, first + len(media)
        grown[index] = (first, written)
    return np.concatenate([*pieces, reply_mask[read:]]), grown
