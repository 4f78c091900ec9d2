"""Finds the replies in what a chat template without `{% generation %}` blocks writes."""

import os
import re
from collections.abc import Callable

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import is_trained

Span = tuple[int, int]
# Reserved: no record has them. One marks the end of the turn before a reply, one stands for the reply's text.
TURN, REPLY = "\U0010ff06", "\U0010ff07"
MARKS = f"[{TURN}{REPLY}]"
THINK, END_OF_THINKING = "<think>", "</think>"
SAID = {"content": [{"type": "text", "text": REPLY}]}


class UntaggedReplies:
    """Called with a conversation: its text, and of every turn of the assistant the characters that the model
    would have to generate there. A turn that is not trained gets an empty span.

    A reply begins after what the text has of the generation prompt. If the generation prompt ends with
    `<think>`, the `<think>` before a reply is not trained; if it has none, an empty thinking block that the
    template writes is trained with the reply, since the model must write it. A reply stops with its
    end-of-turn token, or with its last character if the template writes no such token for it.

    Usually the text begins with the conversation up to the reply, so the lengths of two shorter texts are its
    edges: one more rendering with the generation prompt, one with the reply. A template may write a reply
    differently once others follow (some leave out its thinking). Then marks say where it is: the
    conversation is rendered with a mark in place of the reply's text and one at the end of the turn before.
    This takes up to three renderings more for each such reply. So n replies take at most 1 + 5n renderings,
    each of up to the whole conversation.

    render    (messages, add_generation_prompt=False) → text. Raises BadSample.
    control   matches the tokens that no record can write
    """

    def __init__(self, render: Callable[..., str], control: re.Pattern[str]):
        self._render, self._control = render, control

    def __call__(self, messages: list[dict]) -> tuple[str, list[Span]]:
        """Raises BadSample when a reply cannot be told from the rest of the text."""
        text = self._render(messages)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [
            self._reply(messages, index, text) if is_trained(messages[index]) else (0, 0) for index in replies
        ]

    def _reply(self, messages: list[dict], index: int, text: str) -> Span:
        before = self._render(messages[:index], add_generation_prompt=True)
        through = text.startswith(before) and self._render(messages[: index + 1])
        if through and text.startswith(through) and through.startswith(before):
            start, stop = len(before), len(through)
        else:
            start, stop = self._marked(messages, index, text)
        return start, start + self._length(text[start:stop])

    def _marked(self, messages: list[dict], index: int, text: str) -> Span:
        """The reply as marks show it, with all that the template writes between it and the next turn.

        `header` is what the template writes between the marks, `prompted` what it writes after the first
        mark when the conversation ends there and the model is to answer, `end` what it writes after the
        second when the conversation ends with the reply. What is neither common to `header` and `prompted`
        nor follows the common part of `later` and `end` is the reply.
        """
        before, marked_reply, after = messages[:index], messages[index] | SAID, messages[index + 1 :]
        before = [*before[:-1], *map(_with_mark, before[-1:])]
        if after[:1] and after[0]["role"] == "tool":
            marked_answer = [messages[index] | SAID, _with_mark(after[0]), *after[1:]]
            if re.findall(MARKS, self._render([*messages[:index], *marked_answer])) == [TURN, REPLY]:
                detail = f"the answer of a tool stands within turn {index}, before its text"
                remedy = "give its text a turn of its own, before the calls"
                raise BadSample("template_error", f"{detail}; {remedy}")
        earlier, header, later = self._around([*before, marked_reply, *after], index)
        _, _, end = self._around([*before, marked_reply], index) if after else (earlier, header, later)
        prompt_text = self._render(before, add_generation_prompt=True)
        prompted = prompt_text.partition(TURN)[2] if before else prompt_text

        if not before and header.endswith(prompted):  # the template opens with a system prompt of its own
            prompted = header
        elif not text.startswith(earlier + prompted):  # this turn lacks a part of the generation prompt
            prompted = self._common(header, prompted)
        start = len(earlier + prompted)
        text_after = later.removeprefix(self._common(later, end))
        stop = len(text) - len(text_after)
        if start <= stop and text.startswith(earlier + prompted) and text.endswith(text_after):
            return start, stop
        detail = f"with another text in turn {index}, a reply, the prompt differs around it, too"
        raise BadSample("template_error", detail)

    def _around(self, messages: list[dict], index: int) -> list[str]:
        """The texts before, between and after the marks; no turn is before the first one."""
        text = self._render(messages)
        text = text if index else TURN + text
        if re.findall(MARKS, text) != [TURN, REPLY]:
            raise BadSample("template_error", f"the text of turn {index}, a reply, is not in the prompt once")
        return re.split(MARKS, text)

    def _common(self, first: str, second: str) -> str:
        """The common beginning of both texts, without a part of a control token."""
        common = os.path.commonprefix((first, second))
        for match in self._control.finditer(first):
            if match.end() > len(common):
                return common[: match.start()]
        return common

    def _length(self, reply: str) -> int:
        """The reply's length without the whitespace that templates put after an end-of-turn token."""
        ends = [match.end() for match in self._control.finditer(reply)]
        return ends[-1] if ends and not reply[ends[-1] :].strip() else len(reply)


def _with_mark(message: dict) -> dict:
    """A turn whose last text ends with the mark; whitespace stays last, as some templates strip it."""
    parts = list(message["content"])
    texts = [place for place, part in enumerate(parts) if part["type"] == "text"]
    place = texts[-1] if texts else len(parts)
    text = parts[place]["text"] if texts else ""
    marked = text.rstrip() + TURN + text[len(text.rstrip()) :]
    parts[place : place + 1] = [{"type": "text", "text": marked}]
    return message | {"content": parts}


def between_thinking(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Finds the text before, between and after the blocks `<think>...</think>` of `text[start:stop]`.

    The first block may lack its beginning, as models write it that are prompted with `<think>`: then nothing
    lies before it.
    """
    pieces, read = [], start
    while (end := text.find(END_OF_THINKING, read, stop)) >= 0:
        begin = text.find(THINK, read, end)
        if begin >= 0 or not pieces:
            pieces.append((start, begin if begin >= 0 else start))
            start = end + len(END_OF_THINKING)
        read = end + len(END_OF_THINKING)
    return [*pieces, (start, stop)]
