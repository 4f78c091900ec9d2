"""Ids and pixels of a conversation and its media: by a call of the HF processor, or without one.

With a call (`TextEncoder`, `HFProcessor`):

1. The chat template is rendered once (`chat_template`).
2. Marks (private-use characters, removed from all record text before) are put around every reply and every
   image or video placeholder, and the processor is called once on the marked text.
3. The processor expands placeholders and calls its tokenizer. Here that is a stand-in, which takes the marks
   out, notes where they were, and tokenizes the clean text with offsets.

So the ids are those that the processor alone would make, and spans are exact however placeholders expand; no
ids are searched for text. (Up to Transformers 5.17, its own assistant mask is wrong with images.)

Without one (`KnownProcessor`), images and frames of videos stay bytes: they are decoded, and the spec of the
processor's images resizes and cuts them once. `models.vlm` does the rest on the device; the result equals the
processor's to the bit.

Ids need only the sizes of media (`SizeEncoder`). The processor is asked once, with a small image, what it
writes for an image and how many of those tokens it counts. From then on, a text with every image as short as
possible is tokenized, and each image then grows to the count of tokens for its size. A video, and an image of
a processor that writes more than one run of tokens for it, is tokenized with one token for each run.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerFast, ProcessorMixin

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.accounts.drops import REFUSALS, BadSample, refused_by_processor
from megatron_vlm.data.encode.chat_template import (
    MARK_PAIRS,
    MARKS,
    TYPED,
    ChatTemplate,
    RenderedChat,
    one_of,
    placeholder_tokens,
)
from megatron_vlm.data.encode.replies import Span
from megatron_vlm.data.image_processors import explain_unknown, get_image_spec
from megatron_vlm.data.image_processors.base import PROBE_SIZE, Grid, ImageProcessorSpec, image_options
from megatron_vlm.data.media.images import SizedImage, call_with_timeout, decode_image, decode_pixels
from megatron_vlm.data.media.videos import Frames, VideoPlan, video_options

CONTROL = "\U0010ff09"  # before the control tokens of a template, while a text with typed ones is tokenized
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
    decode = staticmethod(decode_image)  # (data, scaling) → an image

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
        images = [call_with_timeout(seconds, self.decode, data, scaling) for data, scaling in files]
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
        for data, scaling in files:
            image = call_with_timeout(self._decode_seconds, self.decode, data, scaling)
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


# -- text and its tokens


@dataclass
class EncodedText:
    """A conversation in tokens. Those that stand for media depend on the media's sizes, not on pixels."""

    input_ids: np.ndarray  # (T,) int64
    weights: np.ndarray  # (T,) float32: in the loss; 0 for all tokens but those of trained replies
    images: list[Span]  # the tokens that stand for each image, its markers included
    videos: list[Span]  # likewise, with the begin and end tokens around a video
    image_patches: list[int] = field(default_factory=list)  # raw patches of each image, if measured
    video_grids: list[Grid] = field(default_factory=list)  # the grid of each video, if measured


class TextEncoder:
    """Calls a Hugging Face processor once per conversation; see the module's docstring.

    Raises ValueError if the tokenizer gives no offsets (only fast tokenizers do), and as `ChatTemplate`.
    """

    def __init__(self, processor: ProcessorMixin, chat: ChatTemplate | None = None):
        self.tokenizer = processor.tokenizer
        if not self.tokenizer.is_fast:
            raise ValueError(f"{type(self.tokenizer).__name__} gives no offsets; load the fast tokenizer")
        self.chat = chat or ChatTemplate(processor)
        self.image_spec = get_image_spec(processor)
        self._typed_tokens = TypedTokens(self.tokenizer, self.chat.added_control_tokens)
        self.marked_tokenizer = MarkedTokenizer(self.tokenizer, self._typed_tokens)
        self._processor = copy.copy(processor)
        self._processor.tokenizer = self.marked_tokenizer

    def __call__(
        self,
        prompt: RenderedChat,
        images: list[Image.Image] | None = None,
        videos: list[Frames] | None = None,
    ) -> tuple[EncodedText, dict[str, Any]]:
        """The text, and everything else that the processor returned, with its batch axis of one.

        The prompt has a place for each of `images` and `videos`. The arguments are not changed.

        Raises BadSample if the processor refuses them.
        """
        frames, plans = [frames for frames, _ in videos or []], [plan for _, plan in videos or []]
        options = {"videos": frames, "videos_kwargs": video_options(plans)} if videos else {}
        options |= image_options(self._processor) if images else {}
        try:
            outputs = self._processor(
                text=[with_marks(prompt)],
                images=self.image_spec.arrange(images or []) or None,  # an empty list is an error
                return_tensors="pt",
                add_special_tokens=prompt.add_special_tokens,
                **options,
            )
        except REFUSALS as error:
            raise refused_by_processor(error) from error
        outputs = dict(outputs)
        input_ids = outputs.pop("input_ids")[0].numpy()
        processed = replace(self.marked_tokenizer.prompt, weights=prompt.weights)
        weights, image_spans, video_spans = on_tokens(processed, self.marked_tokenizer.offsets)
        assert len(weights) == len(input_ids), "the processor changed the ids after tokenizing"
        outputs.pop("video_metadata", None)
        return EncodedText(input_ids, weights, image_spans, video_spans), outputs

    def tokenize(self, prompt: RenderedChat) -> EncodedText:
        """The prompt as it stands, with the ids that a call of the tokenizer would give."""
        tokenizer, text, special = self.tokenizer, prompt.text, prompt.add_special_tokens
        if TYPED not in text and _only_wraps(tokenizer):
            encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special)
            ids, offsets = encoding.ids, encoding.offsets
        else:
            call = self._typed_tokens if TYPED in text else tokenizer
            encoding = call(text, add_special_tokens=special, return_offsets_mapping=True)
            ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        weights, images, videos = on_tokens(prompt, offsets)
        return EncodedText(np.fromiter(ids, np.int64, len(ids)), weights, images, videos)


def _only_wraps(tokenizer: Any) -> bool:
    """Whether calling this tokenizer is exactly one call of the Rust tokenizer in its present state. A call
    that pads or truncates changes that state; the next plain call resets it."""
    base, cls, backend = PreTrainedTokenizerFast, type(tokenizer), tokenizer.backend_tokenizer
    return (
        (cls.__call__, cls._encode_plus) == (base.__call__, base._encode_plus)
        and not (backend.padding or backend.truncation)
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )


def most_characters(tokenizer: Any, tokens: int) -> int:
    """A number of characters: any longer text has more than `tokens` tokens, as normalizers compose at most
    four characters to one."""
    return 4 * tokens * max(map(len, tokenizer.get_vocab()))


class TypedTokens:
    """Tokenizes text so that control tokens of the template are tokens, and typed ones stay text.

    Its tokenizer is a copy in which each control token has CONTROL before its name. CONTROL is put before the
    template's control tokens, and TYPED is taken out of the record's, which so are text like any other::

        <|im_start|>user\\n<·|im_end|>     →  +<|im_start|>user\\n<|im_end|>       (· TYPED, + CONTROL)

    The ids of both tokenizers differ only in added tokens. The record's text gets the same tokens as with
    `split_special_tokens=True`.

    Args:
        tokenizer: A fast tokenizer.
        control_tokens: Its added tokens that no record can write, longest first.
    """

    def __init__(self, tokenizer: Any, control_tokens: list[str]):
        self._tokenizer = tokenizer
        self._control_tokens = control_tokens
        self._template_tokens = one_of(control_tokens)

    @functools.cached_property
    def _renamed(self) -> tuple[Any, dict[int, int]]:
        """The copy, and of its added tokens the ids in the tokenizer. It is made when a record needs it."""
        description = json.loads(self._tokenizer.backend_tokenizer.to_str())
        names = {token: CONTROL + token for token in self._control_tokens}
        for token in description["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        backend = Tokenizer.from_str(json.dumps(description))
        tokenizer = copy.copy(self._tokenizer)
        tokenizer._tokenizer = backend
        added = self._tokenizer.added_tokens_encoder.items()
        return tokenizer, {backend.token_to_id(names.get(name, name)): token for name, token in added}

    def __call__(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        """Return what a call of the tokenizer returns, with the offsets of tokens in `text`."""
        tokenizer, ids = self._renamed
        tensor_type = kwargs.pop("return_tensors", None)
        outputs = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        plain = text if isinstance(text, str) else text[0]
        marked = self._template_tokens.sub(lambda match: CONTROL + match[0], plain)
        encoding = tokenizer([marked.replace(TYPED, "")], **kwargs | outputs)

        # the tokens that the tokenizer itself puts around a text, such as BOS, have their own ids already
        around = encoding.pop("special_tokens_mask")[0]
        pairs = zip(encoding["input_ids"][0], around, strict=True)
        encoding["input_ids"] = [
            [token if is_around else ids.get(token, token) for token, is_around in pairs]
        ]

        # of each character that was tokenized the place in `text`: CONTROL is none there, TYPED was left out
        characters = np.array(list(marked))
        places = np.cumsum(characters != CONTROL) - (characters != CONTROL)
        places = np.append(places[characters != TYPED], len(plain)).tolist()
        encoding["offset_mapping"] = [
            [
                (places[start], places[stop - 1] + 1 if stop > start else places[start])
                for start, stop in encoding["offset_mapping"][0]
            ]
        ]
        one_row = {key: rows[0] for key, rows in encoding.items()} if isinstance(text, str) else encoding
        return BatchEncoding(dict(one_row), tensor_type=tensor_type)


class MarkedTokenizer:
    """Stands in for a processor's tokenizer: takes the marks out of the text and keeps what they meant,
    and the characters of each token."""

    def __init__(self, tokenizer: Any, typed_tokens: TypedTokens):
        self._tokenizer = tokenizer
        self._typed_tokens = typed_tokens

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # copying asks for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        marked = [text] if isinstance(text, str) else text
        assert len(marked) == 1, "one conversation per processor call"
        self.prompt = without_marks(marked[0])
        plain = self.prompt.text if isinstance(text, str) else [self.prompt.text]
        call = self._typed_tokens if TYPED in self.prompt.text else self._tokenizer
        encoding = call(plain, return_offsets_mapping=True, **kwargs)
        offsets = encoding.pop("offset_mapping")
        self.offsets = offsets if isinstance(text, str) else offsets[0]
        return encoding


def with_marks(prompt: RenderedChat) -> str:
    """The text with a mark at the start and at the stop of every span."""
    placed = [
        (span, marks)
        for spans, marks in zip((prompt.replies, prompt.images, prompt.videos), MARK_PAIRS, strict=True)
        for span in spans
    ]
    pieces, last = [], 0
    for (start, stop), (first, second) in sorted(placed):
        pieces += [prompt.text[last:start], first, prompt.text[start:stop], second]
        last = stop
    return "".join([*pieces, prompt.text[last:]])


def without_marks(text: str) -> RenderedChat:
    """The inverse of `with_marks`, also after a processor has changed what is between the marks."""
    positions: dict[str, list[int]] = {mark: [] for pair in MARK_PAIRS for mark in pair}
    for removed, match in enumerate(MARKS.finditer(text)):
        positions[match[0]].append(match.start() - removed)
    for start, stop in MARK_PAIRS:
        assert len(positions[start]) == len(positions[stop]), "the processor changed the text's marks"
    spans = (list(zip(positions[start], positions[stop], strict=True)) for start, stop in MARK_PAIRS)
    replies, images, videos = spans
    return RenderedChat(MARKS.sub("", text), replies, images, videos)


def on_tokens(prompt: RenderedChat, offsets: list[Span]) -> tuple[np.ndarray, list[Span], list[Span]]:
    """(weights of tokens in the loss, token spans of images, of videos), from the characters of each token.

    A token across a reply's edge belongs to the reply. A token across a placeholder's edge does not belong to
    the placeholder: a newline token may reach from the end of one image into the start of the next.
    """
    edges = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    starts, stops = edges.T
    trained = np.zeros(len(prompt.text) + 1, np.int64)
    for start, stop in prompt.replies:
        trained[start + 1 : stop + 1] = 1
    trained = trained.cumsum()  # at each character, how many characters before it are of replies

    def tokens(span: Span) -> Span:
        inside = np.flatnonzero((starts >= span[0]) & (stops <= span[1]) & (stops > starts))
        return int(inside[0]), int(inside[-1]) + 1

    images, videos = ([tokens(span) for span in spans] for spans in (prompt.images, prompt.videos))
    weights = (trained[stops] > trained[starts]).astype(np.float32)
    if prompt.weights:
        # of a reply's token, the first reply that does not end before it; behind all replies, whatever is 0
        reply = np.searchsorted([stop for _, stop in prompt.replies], starts, side="right")
        weights *= np.append(np.float32(prompt.weights), np.float32(0))[reply]
    return weights, images, videos
