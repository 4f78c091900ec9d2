"""The exact length of a sample's encoding from its text and the sizes of its images, without their pixels.

The processor is asked once, with a small image, what it writes for an image and how many of the tokens it
counts; from then on its own count of tokens for an image size (`_get_num_multimodal_tokens`) is added to the
tokens of a text in which every image is written as short as possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from PIL import Image
from transformers import ProcessorMixin
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.spans import IMAGE_START, IMAGE_STOP, Span, SpanProcessor, placeholder_tokens

# Pixels along the side of a tower's patch where the processor does not say: that of SigLIP, Gemma3's tower.
PATCH_SIZE = 14
PROBE_SIZE = (56, 56)
MARKED_IMAGE = re.compile(f"{IMAGE_START}.*?{IMAGE_STOP}", re.DOTALL)


@dataclass
class Layout:
    """What the encoding of a conversation will look like."""

    reply_mask: np.ndarray  # (T,) bool
    images: list[Span]
    patches: list[int]  # raw patches of each image

    def __len__(self) -> int:
        return len(self.reply_mask)


class Measure:
    """Called as `SpanProcessor`, with the sizes (width, height) of the images instead of the images.

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
        self, messages: list[dict], tools: list[dict] | None, sizes: list[tuple[int, int]]
    ) -> Layout:
        """Raises BadSample when the template or the processor refuses the conversation."""
        marked, options = self._encode_text.marked(messages, tools, len(sizes))
        reply_mask, spans = self._tokenize(marked, options, self._short_image)
        tokens, patches = self._tokens_and_patches(sizes)
        pieces, images, read, written = [], [], 0, 0
        for (start, stop), count in zip(spans, tokens, strict=True):
            image = np.zeros(stop - start + count - self._counted, bool)
            pieces += [reply_mask[read:start], image]
            first = written + start - read
            read, written = stop, first + len(image)
            images.append((first, written))
        return Layout(np.concatenate([*pieces, reply_mask[read:]]), images, patches)

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The raw patches in the tensors of an encoded sample, padding aside."""
        if visual_inputs is None:
            return 0
        if visual_inputs.image_grid_thw is not None:
            return int(visual_inputs.image_grid_thw.prod(-1).sum())
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
        reply_mask, _ = self._tokenize(marked, options, short_image)
        (told,), _ = self._tokens_and_patches([PROBE_SIZE])
        return short_image, told - (expanded - len(reply_mask))

    def _tokenize(self, marked: str, options: dict, short_image: str) -> tuple[np.ndarray, list[Span]]:
        tokenizer = self._encode_text.marked_tokenizer
        tokenizer(MARKED_IMAGE.sub(lambda _: short_image, marked), **options)
        return tokenizer.reply_mask, tokenizer.images

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
