"""A sample's token ids from its text and the sizes of its images, without their pixels.

The processor is asked once, with a small image, what it writes for an image and how many of those tokens it
counts. From then on, a text with every image as short as possible is tokenized, and each image then grows to
the processor's own count of tokens for its size (`_get_num_multimodal_tokens`).
"""

from __future__ import annotations

import functools
import re

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.data.conversation.turns import refused_by_processor
from megatron_vlm.data.encode.chat_template import placeholder_tokens
from megatron_vlm.data.encode.marks import RenderedChat, Span
from megatron_vlm.data.encode.text import EncodedText, TextEncoder, video_options
from megatron_vlm.data.media import anyres, naflex, tiles
from megatron_vlm.data.media.patches import Grid, pixtral_size
from megatron_vlm.data.media.videos import VideoPlan
from megatron_vlm.data.media_limits import count_tokens, fixed_size, one_size

PROBE_SIZE = (56, 56)
PROBE_MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
]
CUTTING = ("do_pan_and_scan", "do_image_splitting")  # settings that make several images of a large one
ImageTokens = tuple[np.ndarray, int]  # an image's ids without its begin and end tokens, and its raw patches


class SizeEncoder:
    """A `TextEncoder` that takes the tokens of images and the plans of videos instead of their pixels.

    Raises ValueError if the processor cannot tell how many tokens an image of a given size becomes.
    """

    def __init__(self, processor: ProcessorMixin, encode_text: TextEncoder):
        if count_tokens(processor, PROBE_SIZE) is None and not naflex.is_naflex(processor):
            raise ValueError(
                f"{type(processor).__name__} cannot tell the tokens of an image from its size, as packing "
                "needs; use data.packing=none."
            )
        images = processor.image_processor
        if key := next((key for key in CUTTING if getattr(images, key, None)), None):
            raise ValueError(
                f"{type(processor).__name__}: with {key} images give tokens that their size does not "
                "tell, as packing needs; turn it off or use data.packing=none."
            )
        self._processor, self._encode_text = processor, encode_text
        named = (processor, "patch_size"), (images, "patch_size"), (images, "encoder_patch_size")
        self.patch_size = next(filter(None, (getattr(*name, None) for name in named)), None)
        self.patch_size = self.patch_size or anyres.unsaid_patch_size(processor)
        self._one_size = one_size(images)
        self._short_image, self._image_id, self._counted = self._probe()

    def __call__(
        self, prompt: RenderedChat, images: list[ImageTokens], plans: list[VideoPlan]
    ) -> EncodedText:
        """The text in tokens. Raises BadSample if the processor refuses a video."""
        videos = [self._video(plan) for plan in plans]
        texts = [self._short_image] * len(images)
        texts += [
            prompt.text[slice(*span)].replace(self._processor.video_token, text)
            for span, (text, _, _) in zip(prompt.videos, videos, strict=True)
        ]
        short = self._encode_text.tokenize(prompt.with_media(texts))
        grown = [
            self._with_image(short.input_ids[slice(*span)], image_ids)
            for span, (image_ids, _) in zip(short.images, images, strict=True)
        ]
        grown += [
            self._with_runs(short.input_ids[slice(*span)], runs)
            for span, (_, runs, _) in zip(short.videos, videos, strict=True)
        ]
        ids, weights, spans = _grown(short.input_ids, short.weights, [*short.images, *short.videos], grown)
        count = len(images)
        patches, grids = [patches for _, patches in images], [grid for *_, grid in videos]
        return EncodedText(ids, weights, spans[:count], spans[count:], patches, grids)

    def counted(self, size: tuple[int, int], alone: bool = True) -> ImageTokens:
        """The tokens of an image of (width, height), its conversation's only one or not, by the processor's
        own count. The count is exact, the order is not: row breaks are not placed."""
        tokens, patches = self._count(size, alone)
        return np.full(tokens, self._image_id), patches

    def patches_of(self, visual_inputs: GenericVisualInputs | None) -> int:
        """The number of raw patches in the tensors of an encoded sample, without padding."""
        if visual_inputs is None:
            return 0
        grids = (visual_inputs.image_grid_thw, visual_inputs.video_grid_thw)
        if any(grid is not None for grid in grids):
            return sum(int(grid.prod(-1).sum()) for grid in grids if grid is not None)
        if visual_inputs.image_sizes is not None and visual_inputs.image_tiles is None:
            return int(visual_inputs.image_sizes.prod(-1).sum()) // self.patch_size**2
        held = (visual_inputs.pixel_values, visual_inputs.pixel_values_videos)
        return sum(self._patches_in(pixels) for pixels in held if pixels is not None)

    def _patches_in(self, pixels: torch.Tensor) -> int:
        images, height, width = len(pixels), *(pixels.shape[1:3] if is_raw(pixels) else pixels.shape[2:])
        return images * (height // self.patch_size) * (width // self.patch_size)

    def _probe(self) -> tuple[str, int, int]:
        """The shortest text of an image, the id of the image token, and how many tokens of that text the
        processor counts: the image token and what follows, or all."""
        prompt = self._encode_text.chat(PROBE_MESSAGES, None, images=1)
        expanded, _ = self._encode_text(prompt, [Image.new("RGB", PROBE_SIZE)])
        image_id = self._image_token(expanded.input_ids[slice(*expanded.images[0])])
        processed = self._encode_text.marked_tokenizer.prompt
        short_image = processed.text[slice(*processed.images[0])]
        for token in placeholder_tokens(self._processor):
            short_image = re.sub(f"(?:{re.escape(token)})+", lambda _, token=token: token, short_image)
        short = self._encode_text.tokenize(prompt.with_media([short_image]))
        told, _ = self._count(PROBE_SIZE)
        return short_image, image_id, told - (len(expanded.input_ids) - len(short.input_ids))

    def _image_token(self, ids: np.ndarray) -> int:
        """The image token that the tokenizer or the processor names; else the most frequent added token among
        `ids`: a small image may have more newlines around it than tokens in it."""
        counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
        tokenizer = self._processor.tokenizer
        named = (getattr(holder, "image_token_id", None) for holder in (tokenizer, self._processor))
        for candidates in (named, tokenizer.added_tokens_decoder, counts):
            if found := [token for token in candidates if token in counts]:
                return int(max(found, key=counts.__getitem__))
        raise AssertionError("an image has tokens")

    def _with_image(self, short_ids: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        first = int((short_ids == self._image_id).argmax())
        if len(short_ids) - self._counted < first:  # InternVL counts begin and end tokens, too
            image_ids, stop = image_ids[self._counted - 1 :], first + 1
        else:
            stop = first + self._counted
        return np.concatenate([short_ids[:first], image_ids, short_ids[stop:]])

    def _video(self, plan: VideoPlan) -> tuple[str, list[int], Grid]:
        """(the video's text with one token per run of placeholders, the lengths of the runs, its grid).

        The video processor gets frames without memory, so its own rules apply to their shape.
        """
        width, height = plan.size
        frames = torch.empty((len(plan.times), 3, height, width), dtype=torch.uint8, device="meta")
        options = video_options([plan]) | {"input_data_format": "channels_first", "return_metadata": True}
        with refused_by_processor():
            outputs = self._processor.video_processor([frames], return_tensors="pt", **options)
            try:
                text = self._processor.replace_video_token(outputs, 0)
            except NotImplementedError:  # Transformers up to 5.12
                text = tiles.video_text(self._processor, len(frames))
        runs = [len(run[0]) // len(run[run.lastindex]) for run in self._video_runs.finditer(text)]
        text = self._video_runs.sub(lambda run: run[run.lastindex], text)
        if "video_grid_thw" in outputs:
            return text, runs, tuple(outputs["video_grid_thw"][0].tolist())
        times, _, height, width = outputs["pixel_values_videos"][0].shape  # of frames that are images
        return text, runs, (times, height // self.patch_size, width // self.patch_size)

    @functools.cached_property
    def _video_tokens(self) -> list[str]:
        return list({self._processor.video_token, *placeholder_tokens(self._processor)})

    @functools.cached_property
    def _video_runs(self) -> re.Pattern[str]:
        return re.compile("|".join(f"({re.escape(token)})+" for token in self._video_tokens))

    def _with_runs(self, short_ids: np.ndarray, runs: list[int]) -> np.ndarray:
        repeats = np.ones(len(short_ids), int)
        ids = self._processor.tokenizer.convert_tokens_to_ids(self._video_tokens)
        repeats[np.isin(short_ids, ids)] = runs
        return np.repeat(short_ids, repeats)

    @refused_by_processor()
    def _count(self, size: tuple[int, int], alone: bool = True) -> tuple[int, int]:
        """The number of tokens, by the processor's own count, and of raw patches."""
        width, height = size
        if naflex.is_naflex(self._processor):
            return naflex.count(self._processor, height, width)
        if anyres.is_anyres(self._processor):
            return anyres.count(self._processor, height, width, alone)
        images = self._processor.image_processor
        has_grids, pooled = hasattr(images, "merge_size"), getattr(images, "pooling_kernel_size", None)
        if not (has_grids or pooled or self._one_size) and height in (1, 3):
            height = 4  # Pixtral's takes 1 or 3 rows for channels; 4 rows are one row of patches, too
        told = count_tokens(self._processor, (height, width))
        tokens, of_one = told["num_image_tokens"][0], 1  # patch, or those of a tile, or of the whole image
        if not has_grids:
            of_one = tokens * pooled**2 if pooled else self._patches(width, height)
        return tokens, of_one * told["num_image_patches"][0]

    def _patches(self, width: int, height: int) -> int:
        resized = fixed_size if self._one_size else pixtral_size
        height, width = resized(self._processor, height, width)
        return (height // self.patch_size) * (width // self.patch_size)


def _grown(
    ids: np.ndarray, weights: np.ndarray, spans: list[Span], grown: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[Span]]:
    """Ids, weights and spans with `grown` in place of each span's ids; no token of a span is of a reply."""
    new_ids, new_weights, new_spans, read, written = [], [], list(spans), 0, 0
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[index]
        media = grown[index]
        new_ids += [ids[read:start], media]
        new_weights += [weights[read:start], np.zeros(len(media), weights.dtype)]
        first = written + start - read
        read, written = stop, first + len(media)
        new_spans[index] = (first, written)
    return np.concatenate([*new_ids, ids[read:]]), np.concatenate([*new_weights, weights[read:]]), new_spans
