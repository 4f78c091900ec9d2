"""Ids and pixels of a conversation and its media: by a call of the HF processor, or without one.

Without one, images and frames of videos stay bytes: they are decoded, and the kind of the processor's images
resizes and cuts them once. `models.vlm` does the rest on the device; the result equals the processor's to
the bit.

Ids need only the sizes of media. The processor is asked once, with a small image, what it writes for an image
and how many of those tokens it counts. From then on, a text with every image as short as possible is
tokenized, and each image then grows to the count of tokens for its size. A video, and an image of a processor
that writes more than one run of tokens for it, is tokenized with one token for each run.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.accounts.drops import REFUSALS, BadSample, refused_by_processor
from megatron_vlm.data.encode.chat_template import RenderedChat, placeholder_tokens
from megatron_vlm.data.encode.replies import Span
from megatron_vlm.data.encode.text import EncodedText, TextEncoder
from megatron_vlm.data.image_processors import explain_unknown
from megatron_vlm.data.image_processors.base import PROBE_SIZE, Grid, ImageProcessorSpec
from megatron_vlm.data.media.images import SizedImage, decode_image, decode_pixels
from megatron_vlm.data.media.patience import call_with_timeout
from megatron_vlm.data.media.videos import Frames, VideoPlan

# What processors return about the text. We make our own masks, and models find images by token id.
TEXT_KEYS = {"attention_mask", "token_type_ids", "mm_token_type_ids"}
PROBE_MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
]
Grow = Callable[[np.ndarray], np.ndarray]  # of the short ids of an image or a video its whole ones


class HFProcessor:
    """Any Hugging Face processor, called once per conversation.

    text             encodes a conversation by a call of the processor
    visual_keys      the outputs of the processor that the model takes
    decode_seconds   the time that an image may take; see `media.patience`
    """

    known = False
    decode = staticmethod(decode_image)  # (data, max_pixels, min_pixels, size) → an image

    def __init__(self, text: TextEncoder, visual_keys: tuple[str, ...], decode_seconds: float):
        self.image_spec, self.text = text.image_spec, text
        self._visual_keys, self._decode_seconds = visual_keys, decode_seconds
        self.image_spec.check_settings()

    @functools.cached_property
    def sizes(self) -> SizeEncoder:
        """Gives the text of a call, or one of equal length. Raises ValueError if it cannot."""
        try:
            return SizeEncoder(self.text, self.known)
        except BadSample as bad:
            raise ValueError(
                f"{type(self.image_spec.processor).__name__}: a question about an image is refused ({bad}), "
                "and packing needs its tokens; correct processor or chat template, or use data.packing=none."
            ) from bad

    def __call__(
        self,
        prompt: RenderedChat,
        files: list[SizedImage],
        videos: list[Frames],
        text: EncodedText | None = None,
    ) -> tuple[EncodedText, GenericVisualInputs | None]:
        """The text, and the images and videos as the model takes them. `files` are what `decode` takes;
        `text` is what `sizes` gave, if called.

        Raises BadSample when an image cannot be decoded or the processor refuses what it gets, and ValueError
        if it makes something that is not among the model's visual keys.
        """
        seconds = self._decode_seconds
        images = [call_with_timeout(seconds, file.decoded_by, self.decode) for file in files]
        for image in images:
            self.image_spec.refuse(image.height, image.width, len(images) == 1)
        encoded, outputs = self.text(prompt, images, videos)
        outputs = self.image_spec.unpad(outputs)
        self._check_keys(outputs.keys() - TEXT_KEYS)
        tensors = {key: outputs[key] for key in self._visual_keys if key in outputs}
        return encoded, GenericVisualInputs(**tensors) if tensors else None

    def _check_keys(self, keys: Iterable[str]) -> None:
        if unexpected := sorted(set(keys) - set(self._visual_keys)):
            raise ValueError(
                f"{type(self.image_spec.processor).__name__} returned {unexpected}, which are not in "
                f"visual_keys = {self._visual_keys}; add those that the model takes"
            )


class KnownProcessor(HFProcessor):
    """A known processor, not called: ids, masks and spans equal its own, and so do the uint8 pixels once a
    `PixelNormalizer` has normalized them."""

    known = True
    decode = staticmethod(decode_pixels)

    def __call__(self, prompt, files, videos, text=None) -> tuple[EncodedText, GenericVisualInputs | None]:
        tensors, sizes = [], []
        # cut each image right after it is decoded: its pixels are still in the caches
        for file in files:
            image = call_with_timeout(self._decode_seconds, file.decoded_by, self.decode)
            tensors.append(self.tensors(image, len(files) == 1))
            sizes.append(image.shape[1::-1])
        if text is None:
            text = self.sizes(prompt, sizes, [plan for _, plan in videos])
        for (frames, plan), grid in zip(videos, text.video_grids, strict=True):
            tensors.append(self.image_spec.of_video(frames, plan, grid))
        spans = [*text.images, *text.videos]
        in_text = sorted(range(len(spans)), key=spans.__getitem__)  # frames may be among the images
        self._check_keys(key for item in tensors for key in item)
        return text, GenericVisualInputs.cat([GenericVisualInputs(**tensors[item]) for item in in_text])

    def tensors(self, image: np.ndarray, alone: bool) -> dict[str, Tensor]:
        """The tensors of an image, which is its conversation's only one or not. Raises BadSample."""
        try:
            return self.image_spec.tensors(image, alone)
        except REFUSALS as error:
            raise refused_by_processor(error) from error

    def why_not(self) -> str | None:
        """Why the HF processor has to be called instead; None if this does the same."""
        processor = self.image_spec.processor
        if reason := explain_unknown(processor):
            return reason
        try:
            prompt = self.text.chat(PROBE_MESSAGES, None, images=1)
            expected, _ = self.text(prompt, [Image.new("RGB", PROBE_SIZE)])
            self.tensors(np.zeros((*PROBE_SIZE, 3), np.uint8), alone=True)
            same = self.sizes(prompt, [PROBE_SIZE], [])
        except BadSample as bad:
            return f"a question about an image is refused: {bad}"
        except ValueError as error:
            return str(error)
        if not np.array_equal(same.input_ids, expected.input_ids):
            return f"{type(processor).__name__} writes other tokens for an image than its known version"
        return None


class SizeEncoder:
    """A `TextEncoder` that takes the sizes of images and the plans of videos instead of their pixels. Raises
    ValueError if the processor cannot tell how many tokens an image of a given size becomes."""

    def __init__(self, encode_text: TextEncoder, is_known: bool):
        self._encode_text, self._image_spec = encode_text, encode_text.image_spec
        # of an unknown processor only the number of tokens is sure, not their order: rows may have breaks
        spec = self._image_spec
        self._ids = spec.ids if is_known else functools.partial(ImageProcessorSpec.ids, spec)
        self._processor = self._image_spec.processor
        self._image_spec.check_counts()
        if not self._image_spec.writes_by_size:
            self._short_image, self._image_id, self._counted = self._probe()

    def __call__(
        self, prompt: RenderedChat, sizes: list[tuple[int, int]], plans: list[VideoPlan]
    ) -> EncodedText:
        """The text in tokens. `sizes` are (width, height). Raises BadSample if the processor refuses any."""
        alone = len(sizes) == 1
        try:
            images = [self._image(size, number, alone) for number, size in enumerate(sizes)]
            videos = [self._video(plan, number) for number, plan in enumerate(plans)]
        except REFUSALS as error:
            raise refused_by_processor(error) from error
        # one call of the tokenizer for a text with every image and video as short as possible
        texts = [text for text, *_ in images]
        texts += [
            prompt.text[start:stop].replace(self._processor.video_token, text)
            for (start, stop), (text, _, _) in zip(prompt.videos, videos, strict=True)
        ]
        short = self._encode_text.tokenize(with_media(prompt, texts))
        places = zip([*short.images, *short.videos], [*images, *videos], strict=True)
        # then each grows to its own number of tokens, none of which is trained
        grown = [grow(short.input_ids[start:stop]) for (start, stop), (_, grow, _) in places]
        media, lengths = [*short.images, *short.videos], list(map(len, grown))
        untrained = [np.zeros(length, np.float32) for length in lengths]
        return EncodedText(
            np.concatenate(_replaced(short.input_ids, media, grown)),
            np.concatenate(_replaced(short.weights, media, untrained)),
            _moved(short.images, media, lengths),
            _moved(short.videos, media, lengths),
            [patches for *_, patches in images],
            [grid for *_, grid in videos],
        )

    def _probe(self) -> tuple[str, int, int]:
        """The shortest text of an image, the id of the image token, and a count of that text's tokens.

        The processor counts the image token and what follows, or all.
        """
        prompt = self._encode_text.chat(PROBE_MESSAGES, None, images=1)
        expanded, _ = self._encode_text(prompt, [Image.new("RGB", PROBE_SIZE)])
        image_id = self._image_token(expanded.input_ids[slice(*expanded.images[0])])
        processed = self._encode_text.marked_tokenizer.prompt
        start, end = processed.images[0]
        short_image = processed.text[start:end]
        for token in placeholder_tokens(self._processor):
            short_image = re.sub(f"(?:{re.escape(token)})+", lambda _, token=token: token, short_image)
        short = self._encode_text.tokenize(with_media(prompt, [short_image]))
        try:
            tokens, _ = self._image_spec.count(*PROBE_SIZE, alone=True)
        except REFUSALS as error:
            raise refused_by_processor(error) from error
        return short_image, image_id, tokens - (len(expanded.input_ids) - len(short.input_ids))

    def _image_token(self, ids: np.ndarray) -> int:
        """The image token that the tokenizer or the processor names; else the most frequent added token among
        `ids`: a small image may have more newlines around it than tokens in it."""
        counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
        tokenizer = self._processor.tokenizer
        named_ids = (getattr(holder, "image_token_id", None) for holder in (tokenizer, self._processor))
        for candidates in (named_ids, tokenizer.added_tokens_decoder, counts):
            if ids_in_text := [token for token in candidates if token in counts]:
                return int(max(ids_in_text, key=counts.__getitem__))
        raise AssertionError("an image has tokens")

    def _image(self, size: tuple[int, int], number: int, alone: bool) -> tuple[str, Grow, int]:
        """(the image's text with one token per run, what makes its ids of that text's, its raw patches)"""
        width, height = size
        if self._image_spec.writes_by_size:
            text, patches = self._image_spec.of_size(height, width)
            return *self._by_runs(self._image_spec.label(number, self._processor.image_token) + text), patches
        ids, patches = self._ids(height, width, alone, self._image_id)
        return self._short_image, functools.partial(self._with_image, ids), patches

    def _video(self, plan: VideoPlan, number: int) -> tuple[str, Grow, Grid]:
        """(the video's text with one token per run, what makes its ids of that text's, its grid)"""
        text, grid = self._image_spec.of_plan(plan)
        return *self._by_runs(self._image_spec.label(number, self._processor.video_token) + text), grid

    def _with_image(self, image_ids: np.ndarray, short_ids: np.ndarray) -> np.ndarray:
        first = int((short_ids == self._image_id).argmax())
        if len(short_ids) - self._counted < first:  # begin and end tokens are counted, too
            image_ids, stop = image_ids[self._counted - 1 :], first + 1
        else:
            stop = first + self._counted
        return np.concatenate([short_ids[:first], image_ids, short_ids[stop:]])

    def _by_runs(self, text: str) -> tuple[str, Grow]:
        runs = [len(run[0]) // len(run[run.lastindex]) for run in self._runs.finditer(text)]
        return self._runs.sub(lambda run: run[run.lastindex], text), functools.partial(self._with_runs, runs)

    def _with_runs(self, runs: list[int], short_ids: np.ndarray) -> np.ndarray:
        repeats = np.ones(len(short_ids), int)
        repeats[np.isin(short_ids, list(self._media_tokens.values()))] = runs
        return np.repeat(short_ids, repeats)

    @functools.cached_property
    def _media_tokens(self) -> dict[str, int]:
        """The tokens that stand for media, with their ids: what a template writes need not be one of them."""
        vocabulary = self._processor.tokenizer.get_vocab()
        names = {getattr(self._processor, "video_token", None), *placeholder_tokens(self._processor)}
        return {name: vocabulary[name] for name in names if name in vocabulary}

    @functools.cached_property
    def _runs(self) -> re.Pattern[str]:
        return re.compile("|".join(f"({re.escape(token)})+" for token in self._media_tokens))


def with_media(prompt: RenderedChat, texts: list[str]) -> RenderedChat:
    """The conversation with `texts` in place of the images, then of the videos."""
    media, lengths = [*prompt.images, *prompt.videos], list(map(len, texts))
    return replace(
        prompt,
        text="".join(_replaced(prompt.text, media, texts)),
        replies=_moved(prompt.replies, media, lengths),
        images=_moved(prompt.images, media, lengths),
        videos=_moved(prompt.videos, media, lengths),
    )


def _replaced(sequence: Any, spans: list[Span], contents: list) -> list:
    """The pieces of a text or of ids, with `contents` in place of the spans."""
    pieces, read = [], 0
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[place]
        pieces += [sequence[read:start], contents[place]]
        read = stop
    return [*pieces, sequence[read:]]


def _moved(spans: list[Span], replaced: list[Span], lengths: list[int]) -> list[Span]:
    """Where `spans` lie once each replaced span has its new length; no edge lies inside one."""
    in_order = sorted(zip(replaced, lengths, strict=True))
    stops = [stop for (_, stop), _ in in_order]
    growth = [0, *accumulate(length - (stop - start) for (start, stop), length in in_order)]
    return [tuple(edge + growth[bisect_right(stops, edge)] for edge in span) for span in spans]
