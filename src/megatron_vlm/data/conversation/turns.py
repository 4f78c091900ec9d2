"""Reads what a turn says of its own training: its weight in the loss, its thinking; and `BadSample`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import eq
from typing import Any

DOCUMENT = "document"  # the role of a conversation's only turn: interleaved text and images, all text trained
TRAINED = ("assistant", DOCUMENT)
ROLES = {  # as people name it -> the role
    DOCUMENT: DOCUMENT,
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
WEIGHTS = ("loss", "weight")  # the first that a turn has counts
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")  # beside a reply's content
THINK, END_OF_THINKING = "<think>", "</think>"
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # besides 0


class BadSample(Exception):
    """This sample cannot be trained on; `reason` is a key of `drops.REASONS`, `detail` is for people."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


# What processors raise on images and videos that they cannot take: beside ValueErrors of their own, those of
# arithmetic with sizes that become 0, and torch's
_REFUSALS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def refused_by_processor() -> Iterator[None]:
    """Turns what a processor raises on a sample's media into BadSample."""
    try:
        yield
    except _REFUSALS as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise BadSample("processor_error", said) from error


def sole(
    record: Mapping[str, Any],
    names: Sequence[str],
    reason: str = "bad_conversation",
    place: str = "",
    same: Callable[[Any, Any], bool] = eq,
) -> str | None:
    """The first of these names of one field that has a value; None, an empty text and an empty list are none.

    Raises BadSample if another has a value that is not the `same`: nothing says which is meant. An item and a
    list of it are the same.
    """
    first, *others = [name for name in names if record.get(name) not in (None, "", [])] or [None]
    for other in others:
        one, two = record[first], record[other]
        if one not in (two, [two]) and two != [one] and not same(one, two):
            text = f"{first} and {other} are two names of one field, and differ; leave one out"
            raise BadSample(reason, place + text)
    return first


def loss_weight(turn: dict) -> float:
    """The weight of a turn's tokens in the loss: what its `loss` or OpenAI's `weight` says, true and false
    being 1 and 0; 1 for a reply that says nothing, 0 for turns that are no replies."""
    if turn["role"] not in TRAINED:
        return 0.0
    return float(next((turn[key] for key in WEIGHTS if turn.get(key) is not None), 1))


def is_trained(turn: dict) -> bool:
    """Whether a turn is a reply to train on."""
    return loss_weight(turn) > 0


def mistake(turn: dict) -> str | None:
    """A message about a wrong weight of a turn."""
    for key in WEIGHTS:
        if not _is_weight(turn.get(key)):
            return f"{key} {turn[key]!r}, not true, false or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
    weights = {float(turn[key]) for key in WEIGHTS if turn.get(key) is not None}
    return f"{' and '.join(WEIGHTS)}, which differ" if len(weights) > 1 else None


def without_thinking(turn: dict) -> dict:
    """A reply without the thinking blocks in its text, and without THINKING_KEYS."""

    def rest(text: str) -> str:
        pieces = between_thinking(text, 0, len(text))
        texts = [text[start:stop] for start, stop in pieces]
        return "".join(texts[:1] + [piece.lstrip() for piece in texts[1:]])

    parts = [part | {"text": rest(part["text"])} for part in turn["content"]]
    return {key: value for key, value in turn.items() if key not in THINKING_KEYS} | {"content": parts}


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


def _is_weight(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)
