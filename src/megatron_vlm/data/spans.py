"""Conversation → token ids, the mask of the assistant's replies, and where each image lies; any HF processor.

1. The chat template is rendered once. Where replies lie in that text, the template's `{% generation %}`
   blocks say; for a template without them, the lengths of the rendered beginnings of the conversation do.
2. Marks (private-use characters, removed from all record text before) are put around every reply and every
   image placeholder, and the processor is called once on the marked text.
3. The processor expands placeholders and calls its tokenizer: here a stand-in that takes the marks out,
   notes where they were, and tokenizes the clean text with offsets.

So ids are the ones the processor makes without us, and spans are exact at any expansion, without searching
ids for text. (Transformers' own assistant mask is wrong with images up to 5.17.)
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor
from transformers import BatchEncoding, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_vlm.data.chatml import BadSample

REPLY_START, REPLY_STOP, IMAGE_START, IMAGE_STOP = map(chr, range(0x10FF00, 0x10FF04))
MARKS = re.compile(f"[{REPLY_START}-{IMAGE_STOP}]")
# Ours, and the two characters with which transformers >= 5.23 marks control tokens.
RESERVED = re.compile(f"[{REPLY_START}-{IMAGE_STOP}\U000f0000\U000f0001]")
WORD_JOINER = "\u2060"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACEHOLDER_NAMES = ("boi_token", "image_token")  # Gemma3's template writes the first of its two

Span = tuple[int, int]


@dataclass
class EncodedText:
    input_ids: Tensor  # (T,) int64
    reply_mask: Tensor  # (T,) bool: tokens of the assistant's replies
    images: list[Span]  # the tokens that stand for each image, its markers included
    outputs: dict[str, Any]  # everything else the processor returned, its batch axis of one left on


class SpanProcessor:
    """Calls a Hugging Face processor once per conversation; see the module's docstring.

    Special tokens typed in record text are broken by a word joiner after their first character, so that no
    record can write a role marker or an image token. Added tokens that are not special (`<think>`) remain.

    Raises ValueError when the tokenizer has no offsets (only fast tokenizers do), or when the template marks
    no replies and they cannot be found by rendering beginnings of the conversation.
    """

    def __init__(self, processor: ProcessorMixin, chat_template: str | None = None):
        self.tokenizer = processor.tokenizer
        if not self.tokenizer.is_fast:
            raise ValueError(f"{type(self.tokenizer).__name__} gives no offsets; load the fast tokenizer")
        self.marked_tokenizer = _MarkedTokenizer(self.tokenizer)
        self._processor = copy.copy(processor)
        self._processor.tokenizer = self.marked_tokenizer
        self.template = chat_template or _template_of(processor)
        self._placeholder_tokens = placeholder_tokens(processor)
        self._control_tokens = _control_tokens(processor)
        if not GENERATION_TAG.search(self.template):
            self._probe_template()

    def __call__(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        images: list[Image.Image] | None = None,
    ) -> EncodedText:
        """One conversation whose parts match `images` one to one. The arguments are not changed.

        Raises BadSample when the template or the processor refuses the conversation.
        """
        marked, options = self.marked(messages, tools, len(images or []))
        try:
            outputs = self._processor(
                text=[marked],
                images=images or None,  # an empty list is an error in every version
                return_tensors="pt",
                **options,
            )
        except ValueError as error:
            raise BadSample("processor_error", str(error)) from error
        outputs = dict(outputs)
        input_ids = outputs.pop("input_ids")[0]
        read = self.marked_tokenizer
        assert len(read.reply_mask) == len(input_ids), "the processor changed the ids after tokenizing"
        return EncodedText(input_ids, torch.from_numpy(read.reply_mask), read.images, outputs)

    def marked(self, messages: list[dict], tools: list[dict] | None, images: int) -> tuple[str, dict]:
        """The rendered conversation with marks around replies and placeholders, and the tokenizer's options.

        Raises BadSample when the template refuses the conversation or writes another number of images.
        """
        prompt, replies = self.render(messages, tools)
        bos = self.tokenizer.bos_token
        options = {
            "add_special_tokens": not (bos and prompt.startswith(bos))
        }  # one BOS, as HF's own templates
        return _insert_marks(prompt, replies, self._placeholders(prompt, images)), options

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> tuple[str, list[Span]]:
        """The rendered conversation and the character spans of its replies, record text made harmless."""
        try:
            messages, tools = self._harmless(messages), self._harmless(tools)
            if GENERATION_TAG.search(self.template):
                prompt, spans = self._render(messages, tools, return_assistant_tokens_mask=True)
            else:
                prompt, spans = self._render_beginnings(messages, tools)
            prompt.encode()
        except TemplateError as error:
            raise BadSample("template_error", str(error)) from error
        except RecursionError as error:
            raise BadSample("bad_conversation", "nested too deeply") from error
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
            raise BadSample("bad_conversation", str(error)) from error
        return prompt, spans

    def _render(self, messages: list[dict], tools: list[dict] | None, **how: bool) -> tuple[str, list[Span]]:
        prompts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            **self.tokenizer.special_tokens_map,
            **how,
        )
        return prompts[0], [tuple(span) for span in spans[0]] if spans else []

    def _render_beginnings(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[Span]]:
        """A reply is what the conversation ending in it has more than the one that prompts for it."""
        prompt, _ = self._render(messages, tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], tools, add_generation_prompt=True)
            through, _ = self._render(messages[: index + 1], tools)
            if not (prompt.startswith(through) and through.startswith(before)):
                raise BadSample("template_error", f"turn {index} is rendered differently once others follow")
            spans.append((len(before), len(before) + self._reply_length(through[len(before) :])))
        return prompt, spans

    def _reply_length(self, reply: str) -> int:
        """Without the whitespace that templates put between an end-of-turn token and the next turn."""
        ends = [match.end() for match in self._control_tokens.finditer(reply)]
        return ends[-1] if ends and not reply[ends[-1] :].strip() else len(reply)

    def _probe_template(self) -> None:
        turn = [_text_message("user", "a"), _text_message("assistant", "b")]
        try:
            self._render_beginnings(turn + turn, None)
        except (BadSample, TemplateError) as error:
            raise ValueError(
                f"The chat template has no {{% generation %}} blocks, and without, replies cannot be found: "
                f"{error}. Put {{% generation %}} and {{% endgeneration %}} around what the assistant says, "
                "end-of-turn token included, and pass the result as chat_template."
            ) from error

    def _harmless(self, value: Any) -> Any:
        """A copy of nested record data in which no text holds a control token or a reserved character."""
        if isinstance(value, str):
            return self._control_tokens.sub(_broken, RESERVED.sub("", value))
        if isinstance(value, dict):
            return {self._harmless(key): self._harmless(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._harmless(entry) for entry in value]
        return value

    def _placeholders(self, prompt: str, count: int) -> list[Span]:
        """Where the template put the images; record text is harmless, so every match is its own."""
        seen = 0
        for token in self._placeholder_tokens if count else ():
            found = [match.span() for match in re.finditer(re.escape(token), prompt)]
            if len(found) == count:
                return found
            seen = max(seen, len(found))
        if count:
            raise BadSample("placeholder_mismatch", f"the chat template wrote {seen} of {count} images")
        return []


class _MarkedTokenizer:
    """Stands in for a processor's tokenizer: takes the marks out of the text and keeps what they meant."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.text = ""  # as it came, with marks
        self.reply_mask = np.zeros(0, bool)
        self.images: list[Span] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # asked for before __init__ ran, as when copied
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        marked = [text] if isinstance(text, str) else text
        assert len(marked) == 1, "one conversation per processor call"
        self.text = marked[0]
        plain, replies, images = _remove_marks(self.text)
        plain_text = plain if isinstance(text, str) else [plain]
        encoding = self._tokenizer(plain_text, return_offsets_mapping=True, **kwargs)
        offsets = encoding.pop("offset_mapping")
        offsets = offsets if isinstance(text, str) else offsets[0]
        offsets = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
        self.reply_mask = np.zeros(len(offsets), bool)
        for span in replies:
            self.reply_mask |= _overlapping(offsets, span)
        self.images = [_extent(_inside(offsets, span)) for span in images]
        return encoding


def _insert_marks(prompt: str, replies: list[Span], images: list[Span]) -> str:
    marks = [mark for start, stop in replies for mark in ((start, REPLY_START), (stop, REPLY_STOP))]
    marks += [mark for start, stop in images for mark in ((start, IMAGE_START), (stop, IMAGE_STOP))]
    pieces, last = [], 0
    for position, mark in sorted(marks, key=lambda entry: entry[0]):  # spans never overlap
        pieces += [prompt[last:position], mark]
        last = position
    return "".join([*pieces, prompt[last:]])


def _remove_marks(text: str) -> tuple[str, list[Span], list[Span]]:
    """The text without marks, and the spans of replies and of images in it."""
    found: dict[str, list[int]] = {mark: [] for mark in (REPLY_START, REPLY_STOP, IMAGE_START, IMAGE_STOP)}
    for removed, match in enumerate(MARKS.finditer(text)):
        found[match[0]].append(match.start() - removed)
    assert len(found[REPLY_START]) == len(found[REPLY_STOP]), "the processor changed the text's marks"
    assert len(found[IMAGE_START]) == len(found[IMAGE_STOP]), "the processor changed the text's marks"
    replies = list(zip(found[REPLY_START], found[REPLY_STOP], strict=True))
    images = list(zip(found[IMAGE_START], found[IMAGE_STOP], strict=True))
    return MARKS.sub("", text), replies, images


def _overlapping(offsets: np.ndarray, span: Span) -> np.ndarray:
    """Tokens with a character inside the span; one that straddles its edge counts."""
    starts, stops = offsets.T
    return (stops > span[0]) & (starts < span[1]) & (stops > starts)


def _inside(offsets: np.ndarray, span: Span) -> np.ndarray:
    """Tokens wholly inside the span: a newline token may reach from one image's end into the next's start."""
    starts, stops = offsets.T
    return (starts >= span[0]) & (stops <= span[1]) & (stops > starts)


def _extent(tokens: np.ndarray) -> Span:
    where = np.flatnonzero(tokens)
    return int(where[0]), int(where[-1]) + 1


def _template_of(processor: ProcessorMixin) -> str:
    template = processor.chat_template or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ValueError(f"{type(processor).__name__} has no chat template; pass one as chat_template")
    return template


def _control_tokens(processor: ProcessorMixin) -> re.Pattern[str]:
    tokenizer = processor.tokenizer
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens.update(tokenizer.all_special_tokens, placeholder_tokens(processor))
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def placeholder_tokens(processor: ProcessorMixin) -> list[str]:
    """The tokens that stand for images in what the template writes and in what the processor makes of it."""
    holders = (processor, processor.tokenizer)
    tokens = (getattr(holder, name, None) for name in PLACEHOLDER_NAMES for holder in holders)
    return list(dict.fromkeys(token for token in tokens if isinstance(token, str)))


def _broken(match: re.Match[str]) -> str:
    return match[0][0] + WORD_JOINER + match[0][1:]


def _text_message(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}
