"""Conversation → token ids, their weights in the loss, and where each image lies; any HF processor.

1. The chat template is rendered once (`chat_template`).
2. Marks (private-use characters, removed from all record text before) are put around every reply and every
   image or video placeholder, and the processor is called once on the marked text.
3. The processor expands placeholders and calls its tokenizer. Here that is a stand-in, which takes the marks
   out, notes where they were, and tokenizes the clean text with offsets.

If the expanded text is known without the processor, 2 and 3 are one call of the tokenizer (`tokenize`).

So the ids are those that the processor alone would make, and spans are exact however placeholders expand; no
ids are searched for text. (Up to Transformers 5.17, its own assistant mask is wrong with images.)
"""

import copy
import functools
import json
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast, ProcessorMixin

from megatron_vlm.data.accounts.drops import REFUSALS, refused_by_processor
from megatron_vlm.data.encode.chat_template import (
    MARK_PAIRS,
    MARKS,
    TYPED,
    ChatTemplate,
    RenderedChat,
    one_of,
)
from megatron_vlm.data.encode.replies import Span
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import Grid, image_options
from megatron_vlm.data.media.videos import Frames, video_options

CONTROL = "\U0010ff09"  # before the control tokens of a template, while a text with typed ones is tokenized


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

    def __init__(self, tokenizer: Any, typed_tokens: "TypedTokens"):
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
