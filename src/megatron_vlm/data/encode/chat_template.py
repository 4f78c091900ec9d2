"""Renders a conversation with its chat template and tells where replies, images and videos lie in the text.

The template's `{% generation %}` blocks say where replies lie; for a template without them,
`encode.replies` finds them.
"""

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from transformers import ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import INVISIBLE
from megatron_vlm.data.encode.replies import REPLY, TURN, Span, UntaggedReplies, between_thinking
from megatron_vlm.data.on_disk.fields import DOCUMENT
from megatron_vlm.messages import listed

# Before and after each reply, image and video in what a processor is called with.
MARK_PAIRS = (("\U0010ff00", "\U0010ff01"), ("\U0010ff02", "\U0010ff03"), ("\U0010ff04", "\U0010ff05"))
MARKS = re.compile("[\U0010ff00-\U0010ff05]")
# After the first character of a control token in record text, until `processing.TypedTokens` tokenizes it.
TYPED = "\U0010ff08"
# All marks, and the two characters with which transformers >= 5.23 marks control tokens.
RESERVED = re.compile(f"[\U0010ff00-\U0010ff05{TURN}{REPLY}{TYPED}\U0010ff09\U000f0000\U000f0001]")
BEFORE, AFTER = "before the image", "after the image"  # texts that show how a template writes an image
PROBE_TEXT = "Seven."
GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKS = re.compile(r"(?s)(\s*<think>)?(?P<thinking>.*?)</think>\n*(?P<answer>.*)")
# what a template reads besides values: what is rendered, and functions that Transformers adds
OF_THE_CONVERSATION = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
OF_TRANSFORMERS = ("raise_exception", "strftime_now")
# What a template's own code raises on values it does not expect, besides jinja's errors.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
# a template may write the first of two, and of Qianfan-OCR the last
PLACEHOLDER_NAMES = ("boi_token", "image_token", "image_placeholder_token")


@dataclass
class RenderedChat:
    """A rendered conversation and the character spans of what lies in it; spans may touch but not overlap."""

    text: str
    replies: list[Span]
    images: list[Span]
    videos: list[Span]
    add_special_tokens: bool = True  # False if the template wrote the BOS token
    weights: list[float] = field(default_factory=list)  # of the replies in the loss; empty: 1 for each


class ChatTemplate:
    """The chat template of a processor.

    Control tokens typed in record text get the character TYPED after their first one, so that no record can
    write a role marker or an image token. Tokenizing removes it, and the token stays text. All other added
    tokens are tokens: `<think>`, a user's own, and those that are `spoken`, in which the family writes boxes.

    Content is passed as text, and as a list of parts where it has media, or where the template would lose a
    role's text. So do vLLM and SGLang.

    If the template writes no more for a reply than for an empty one, it does not count, nor does its end.
    With `mask_thinking`, a reply is what lies outside its thinking blocks.

    Raises ValueError if the template marks no replies and they cannot be found.
    """

    def __init__(self, processor: ProcessorMixin, mask_thinking: bool = False, spoken: Sequence[str] = ()):
        self.text = _template_of(processor)
        self._tokenizer = processor.tokenizer
        self._needs_parts = {role for role in PROBED_TURNS if self._loses_text(role)}
        tokens = control_tokens(processor, self.text + self._probed_text(), spoken)
        self._control_tokens = one_of(tokens)
        self.added_control_tokens = [
            token for token in tokens if token in self._tokenizer.added_tokens_encoder
        ]
        self._image_patterns = [re.escape(token) for token in placeholder_tokens(processor)]
        video = getattr(processor, "video_token", None)
        self._video_patterns = [self._with_control_tokens(video)] if video else []
        self._tells_replies = bool(GENERATION_TAG.search(self.text))
        if not self._tells_replies:
            self._probe_template()
        self._next_turn, self._next_reply, self._mask_thinking = None, None, False
        self._no_content = self._what_is_no_content()
        next_reply, self._next_turn = map(self._token_after_replies, ("assistant", "user"))
        self._next_reply = next_reply if next_reply != self._next_turn else None
        self._mask_thinking = mask_thinking

    def _loses_text(self, role: str) -> bool:
        """Whether the template leaves out a turn's text unless it is in a list of parts."""
        turns = PROBED_TURNS[role]
        as_text = [turn | {"content": text_of(turn)} if turn["role"] == role else turn for turn in turns]
        texts = []
        for messages in (as_text, turns):
            try:
                texts.append(self._render_as_is(messages, None)[0])
            except BadSample:
                texts.append("")
        return PROBE_TEXT not in texts[0] and PROBE_TEXT in texts[1]

    def _probed_text(self) -> str:
        """Render turns of each role: the template may build its markers from the roles' names."""
        renderings = []
        for turns in PROBED_TURNS.values():
            with contextlib.suppress(BadSample):
                renderings.append(self._render(turns, None)[0])
        return "".join(renderings)

    def _with_control_tokens(self, video: str) -> str:
        """A pattern of a video with the control tokens right before and after it, but not of other media.
        So no cut leaves a video without its end."""
        other_media = "|".join([*self._image_patterns, re.escape(video)])
        around = f"(?:(?!{other_media})(?:{self._control_tokens.pattern}))?"
        return f"{around}{re.escape(video)}{around}"

    def __call__(
        self, messages: list[dict], tools: list[dict] | None, images: int, videos: int = 0
    ) -> RenderedChat:
        """The rendered conversation. Raises BadSample when the template refuses the conversation or writes
        another number of images or videos."""
        text, replies, weights = self.render(messages, tools)
        weights = [] if set(weights) <= {1} else weights
        return replace(self._placed(text, images, videos), replies=replies, weights=weights)

    def _placed(self, text: str, images: int, videos: int) -> RenderedChat:
        """The text with the places of its images and videos, and without replies."""
        bos = self._tokenizer.bos_token  # a text that begins with it gets no second one
        return RenderedChat(
            text,
            [],
            self._places(text, "images", images, self._image_patterns),
            self._places(text, "videos", videos, self._video_patterns),
            add_special_tokens=not (bos and text.startswith(bos)),
        )

    def prompt(
        self, messages: list[dict], tools: list[dict] | None, images: int, videos: int = 0
    ) -> RenderedChat:
        """The conversation that the model is to continue, with the template's generation prompt at its end.
        No reply is marked. Raises BadSample as a call."""
        with _bad_text(messages):
            text, _ = self._render(
                self._harmless(messages), self._harmless(tools), add_generation_prompt=True
            )
            text.encode()
        return self._placed(text, images, videos)

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> tuple[str, list[Span], list]:
        """The rendered conversation, with record text made harmless.

        It has the character spans of the trained replies and their weights in the loss.
        """
        with _bad_text(messages):
            messages, tools = self._harmless(messages), self._harmless(tools)
            if any(message["role"] == DOCUMENT for message in messages):
                text, spans = self._document(messages)
                text.encode()
                return text, spans, [messages[0].get("loss", 1)] * len(spans)
            if self._tells_replies:
                prompt, spans = self._render(messages, tools, return_assistant_tokens_mask=True)
            else:
                prompt, spans = self._untagged(tools)(self._with_reasoning(messages, tools))
            prompt.encode()
        # leave out replies that are not trained, then add what ends a reply and cut its thinking out
        weights = [message.get("loss", 1) for message in messages if message["role"] == "assistant"]
        weighted = self._trained(prompt, spans, weights)
        spans, weights = [span for span, _ in weighted], [weight for _, weight in weighted]
        if self._next_turn:
            prompt, spans = self._with_ends(prompt, spans)
        if self._mask_thinking:
            pieces = [self._outside_thinking(prompt, start, stop) for start, stop in spans]
            weights = [weight for weight, some in zip(weights, pieces, strict=True) for _ in some]
            spans = [piece for some in pieces for piece in some]
        return prompt, spans, weights

    def unwritten(self, messages: list[dict], tools: list[dict] | None) -> list[str]:
        """Return what the conversation has and the template leaves out: tools, tool calls or reasoning."""
        text = self._text(messages, tools)
        names = ["tools"] if tools and self._text(messages, None) == text else []
        for name, key in (("tool calls", "tool_calls"), ("reasoning", "reasoning_content")):
            if any(message.get(key) for message in messages):
                without = [{k: value for k, value in message.items() if k != key} for message in messages]
                names += [name] if self._text(without, tools) == text else []
        return names if text is not None else []

    def _text(self, messages: list[dict], tools: list[dict] | None) -> str | None:
        """Return the rendered conversation; None if the template refuses it."""
        with contextlib.suppress(BadSample):
            return self._render(self._harmless(messages), self._harmless(tools))[0]
        return None

    def typed(self, messages: list[dict], tools: list[dict] | None) -> list[str]:
        """Return the control tokens that somebody typed into the conversation, which stay text."""
        json_text = json.dumps([messages, tools], ensure_ascii=False, default=str)
        return sorted(set(self._control_tokens.findall(json_text)))

    def _outside_thinking(self, prompt: str, start: int, stop: int) -> list[Span]:
        """The pieces of a reply outside its thinking blocks; none if they say nothing."""
        pieces = [piece for piece in between_thinking(prompt, start, stop) if piece[0] < piece[1]]
        return [] if all(self._no_content.fullmatch(prompt, begin, end) for begin, end in pieces) else pieces

    def _trained(self, prompt: str, replies: list[Span], weights: list[float]) -> list[tuple[Span, float]]:
        """The replies that are trained, with the `weights` of the assistant's turns.

        A reply is left out if its weight is 0 or if it says no more than the template writes for an empty
        one. If the template marks more blocks than there are turns, blocks that touch are one reply.
        """
        merged: list[Span] = []
        for start, stop in replies:
            if len(replies) != len(weights) and merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        if set(weights) <= {1}:
            weights = [1.0] * len(merged)
        elif len(merged) != len(weights):
            detail = f"it marks {len(merged)} replies of {len(weights)}, so none can have a weight of its own"
            raise BadSample("template_error", detail)
        return [
            ((start, stop), weight)
            for (start, stop), weight in zip(merged, weights, strict=True)
            if weight and not self._no_content.fullmatch(prompt, start, stop)
        ]

    def _what_is_no_content(self) -> re.Pattern[str]:
        """A pattern of text without content.

        It matches control tokens, invisible characters, and what the template itself writes into an empty
        reply, such as `<think></think>`.
        """
        no_text = f"(?:{INVISIBLE}|{self._control_tokens.pattern})"
        self._no_content = re.compile(f"{no_text}*+")
        empty = [_text_message("user", "a"), _text_message("assistant", "")]
        try:
            prompt, spans, _ = self.render(empty + empty)
        except (BadSample, ValueError):  # a template that refuses an empty reply
            return self._no_content
        texts = [prompt[start:stop] for start, stop in spans]
        empty_replies = {tuple(filter(None, re.split(f"{no_text}++", text))) for text in texts} - {()}
        longest_first = sorted(empty_replies, reverse=True)  # of two that begin alike
        patterns = "|".join(f"{no_text}*+".join(map(re.escape, pieces)) for pieces in longest_first)
        return re.compile(f"{no_text}*+(?:(?:{patterns}){no_text}*+)?+") if patterns else self._no_content

    def _with_ends(self, prompt: str, replies: list[Span]) -> tuple[str, list[Span]]:
        """Text and replies of a template that ends a reply only with the next turn's marker. The marker is
        trained with the reply, so the model learns to stop; after a final reply it is appended. The marker of
        a reply is not trained with the one before: no server stops there."""
        if (
            replies
            and replies[-1][1] == len(prompt)
            and not self._control_tokens.search(prompt, replies[-1][0])
        ):
            prompt += self._next_turn
        ends = [self._control_tokens.match(prompt, stop) for _, stop in replies]
        return prompt, [
            (start, end.end() if end and end[0] != self._next_reply else stop)
            for (start, stop), end in zip(replies, ends, strict=True)
        ]

    def _token_after_replies(self, role: str) -> str | None:
        """The control token, such as <|user|>, between a reply without its own end and a turn; or None."""
        conversation = (("user", "a"), ("assistant", "b"), (role, "c"))
        turns = [_text_message(role, text) for role, text in conversation]
        try:
            prompt, ((start, stop), *_), _ = self.render(turns)
        except (BadSample, ValueError):  # the template refuses this conversation: replies stay as they are
            return None
        follows = self._control_tokens.match(prompt, stop)
        return follows[0] if follows and not self._control_tokens.search(prompt, start, stop) else None

    def _render(
        self, messages: list[dict], tools: list[dict] | None, **options: bool
    ) -> tuple[str, list[Span]]:
        return self._render_as_is([self._with_content(message) for message in messages], tools, **options)

    def _with_content(self, message: dict) -> dict:
        """The turn with content as text if it has no media and the template takes it."""
        if message["role"] in self._needs_parts or any(part["type"] != "text" for part in message["content"]):
            return message
        return message | {"content": text_of(message)}

    def _render_as_is(
        self, messages: list[dict], tools: list[dict] | None, **options: bool
    ) -> tuple[str, list[Span]]:
        try:
            prompts, spans = render_jinja_template(
                [messages], tools, chat_template=self.text, **self._tokenizer.special_tokens_map, **options
            )
        except TEMPLATE_ERRORS as error:  # such as a tool call without arguments
            raise BadSample("template_error", str(error)) from error
        return prompts[0], [tuple(span) for span in spans[0]] if spans else []

    def _with_reasoning(self, messages: list[dict], tools: list[dict] | None) -> list[dict]:
        """The turns with thinking in their text as `reasoning_content`, if the template writes the same.

        Then a reply's text can be told from its thinking, which the template may put elsewhere.
        """
        moved = [*map(_with_reasoning, messages)] if "reasoning_content" in self.text else messages
        if moved == messages:
            return messages
        return moved if self._text(moved, tools) == self._text(messages, tools) else messages

    def _untagged(self, tools: list[dict] | None) -> UntaggedReplies:
        def render(messages: list[dict], **options: bool) -> str:
            return self._render(messages, tools, **options)[0]

        return UntaggedReplies(render, self._control_tokens)

    def _probe_template(self) -> None:
        turn = [_text_message("user", "a"), _text_message("assistant", "b")]
        try:
            self._untagged(None)(turn + turn)
        except BadSample as error:
            raise ValueError(
                f"The chat template has no {{% generation %}} blocks, and without, replies cannot be found: "
                f"{error}. Put {{% generation %}} and {{% endgeneration %}} around what the assistant says, "
                "end-of-turn token included, in chat_template.jinja of the folder model.hf_path."
            ) from error

    def _harmless(self, value: Any) -> Any:
        """A copy of nested record data in which no text holds a control token or a reserved character."""
        if isinstance(value, str):
            text = value if value.isascii() else RESERVED.sub("", value)
            return self._control_tokens.sub(_broken, text)
        if isinstance(value, dict):
            return {self._harmless(key): self._harmless(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._harmless(entry) for entry in value]
        return value

    @functools.cached_property
    def _image_of_documents(self) -> str:
        """The placeholder of an image, as the template writes it."""
        content = [{"type": "text", "text": BEFORE}, {"type": "image"}, {"type": "text", "text": AFTER}]
        text, _ = self._render([{"role": "user", "content": content}], None)
        image = text.partition(BEFORE)[2].partition(AFTER)[0]
        if not image.strip():
            raise ValueError(
                "The chat template does not write an image between the texts around it, so documents of "
                f"texts and images cannot be written with it: {text[:500]!r}"
            )
        return image

    def _document(self, messages: list[dict]) -> tuple[str, list[Span]]:
        """The text of an interleaved document without the template, and its trained spans: all its own texts
        and the end-of-text token. Raises BadSample if it is not the conversation's only turn."""
        if len(messages) != 1:
            raise BadSample("bad_conversation", f"a document stands alone, here among {len(messages)} turns")
        text, trained = "", []
        for part in [*messages[0]["content"], {"type": "text", "text": self._tokenizer.eos_token or ""}]:
            part_text = self._image_of_documents if part["type"] == "image" else part.get("text", "")
            if part["type"] == "text" and part_text:
                trained.append((len(text), len(text) + len(part_text)))
            text += part_text
        return text, trained

    def _places(self, prompt: str, media: str, count: int, patterns: list[str]) -> list[Span]:
        """Where the template put the images or videos: the first pattern that it wrote `count` times. Record
        text is harmless, so the template wrote every match."""
        most_matches = 0
        for pattern in patterns if count else ():
            spans = [match.span() for match in re.finditer(pattern, prompt)]
            if len(spans) == count:
                return spans
            most_matches = max(most_matches, len(spans))
        if count:
            raise BadSample(
                "placeholder_mismatch", f"the chat template wrote {most_matches} of {count} {media}"
            )
        return []


@contextlib.contextmanager
def _bad_text(messages: list[dict]) -> Iterator[None]:
    """Raises BadSample for what no template can write, and names what some do not take before their words."""
    try:
        yield
    except BadSample as bad:
        roles = [message["role"] for message in messages if message["role"] != "system"]
        textless = any(message["role"] == "assistant" and not message["content"] for message in messages)
        traits = ["begins with a reply"] if roles[:1] == ["assistant"] else []
        traits += ["has a reply without text, such as a call"] if textless else []
        if not traits:
            raise
        conversation = f"the conversation {' and '.join(traits)}, which this template may not take"
        raise BadSample(bad.reason, f"{conversation}: {bad.detail}") from bad
    except RecursionError as error:
        raise BadSample("bad_conversation", "nested too deeply") from error
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise BadSample("bad_conversation", str(error)) from error


def _template_of(processor: ProcessorMixin) -> str:
    template = processor.chat_template or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ValueError(
            f"{type(processor).__name__} has no chat template; set data.chat_template, or write one into "
            "chat_template.jinja of the folder that model.hf_path names."
        )
    return template


def set_chat_template(
    processor: ProcessorMixin, template: str | None, values: Mapping[str, bool | int | float | str]
) -> None:
    """Give a processor a chat template, and the `values` with which it is rendered.

    The values are defaults at the template's head, so it is rendered alike here, by Transformers and by the
    server of an export, where a request may still name others::

        {%- set enable_thinking = enable_thinking | default(false) %}

    Raises ConfigError for a value that the template does not read.
    """
    text = template or _template_of(processor)
    names = names_read(text) - {*OF_THE_CONVERSATION, *processor.tokenizer.special_tokens_map}
    for name in values:
        if name not in names:
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template does not read it; it reads "
                f"{listed(sorted(names)) or 'no such values'}."
            )
    lines = [f"{{%- set {name} = {name} | default({_literal(value)}) %}}\n" for name, value in values.items()]
    processor.chat_template = processor.tokenizer.chat_template = "".join([*lines, text])


def _literal(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def names_read(template: str) -> set[str]:
    """Return the names whose values a template takes from outside. Raises TemplateSyntaxError.

    A name that the template assigns somewhere is one of them if it asks whether the name is defined.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(GENERATION_TAGS.sub("", template))
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tests = [test for test in tree.find_all(nodes.Test) if test.name == "defined"]
    tested_names = {name.name for test in tests for name in test.find_all(nodes.Name)}
    of_itself = {*environment.globals, *OF_TRANSFORMERS, *(assigned - tested_names)}
    return meta.find_undeclared_variables(tree) - of_itself


def control_tokens(processor: ProcessorMixin, template: str, spoken: Sequence[str] = ()) -> list[str]:
    """Return the tokens that no record can write, longest first.

    These are the tokens with a name (BOS, the image token), and the special tokens that are in the `template`
    or in the source of the processor. Other special tokens are a user's own.
    """
    tokenizer = processor.tokenizer
    source = _source_of(processor)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = {token for token in special if token in template or _is_written_by(source, token)}
    tokens.update(token for token in tokenizer.special_tokens_map.values() if isinstance(token, str))
    attribute_values = vars(processor).values()
    tokens.update(token for token in attribute_values if isinstance(token, str) and token in special)
    tokens.update(placeholder_tokens(processor))
    tokens.add(getattr(processor, "video_token", None) or "")
    return sorted(
        (token for token in tokens if len(token) > 1 and token not in spoken), key=len, reverse=True
    )


def _source_of(processor: ProcessorMixin) -> str:
    try:
        return inspect.getsource(sys.modules[type(processor).__module__])
    except OSError:
        return ""


def _is_written_by(source: str, token: str) -> bool:
    """Whether the source has the token, or an f-string for its numbers, such as <row_{row}_col_{col}>."""
    return re.search(re.sub(r"\d+", r"(?:\\d+|\\{[^{}]*\\})", re.escape(token)), source) is not None


def one_of(tokens: list[str]) -> re.Pattern[str]:
    """Return a pattern of these tokens, longest first. If there are none, it matches nothing."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def placeholder_tokens(processor: ProcessorMixin) -> list[str]:
    """The tokens that stand for images in what the template writes and in what the processor makes of it."""
    holders = (processor, processor.tokenizer)
    tokens = (getattr(holder, name, None) for name in PLACEHOLDER_NAMES for holder in holders)
    return list(dict.fromkeys(token for token in tokens if isinstance(token, str)))


def _broken(match: re.Match[str]) -> str:
    return match[0][0] + TYPED + match[0][1:]


def _with_reasoning(message: dict) -> dict:
    """The turn; a reply of one text that begins with thinking has it as `reasoning_content`."""
    is_text = message["role"] == "assistant" and [part["type"] for part in message["content"]] == ["text"]
    thinks = is_text and THINKS.fullmatch(message["content"][0]["text"])
    if not thinks or "reasoning_content" in message:
        return message
    content = [{"type": "text", "text": thinks["answer"]}]
    return message | {"content": content, "reasoning_content": thinks["thinking"].strip("\n")}


def _text_message(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def text_of(turn: dict) -> str:
    """The text of a clean turn, without its media."""
    return "".join(part["text"] for part in turn["content"] if part["type"] == "text")


_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_ASKED = [_text_message("user", "a")]
PROBED_TURNS = {  # of each role a conversation in which one turn has the PROBE_TEXT
    "system": [_text_message("system", PROBE_TEXT), *_ASKED],
    "user": [_text_message("user", PROBE_TEXT)],
    "assistant": [*_ASKED, _text_message("assistant", PROBE_TEXT)],
    "tool": [
        *_ASKED,
        _text_message("assistant", "b") | {"tool_calls": [_CALL]},
        _text_message("tool", PROBE_TEXT),
    ],
}
