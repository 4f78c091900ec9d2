"""Reads what a turn says of its own training: its weight in the loss, its thinking."""

from collections.abc import Callable, Mapping, Sequence
from operator import eq
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample

DOCUMENT = "document"  # the role of a conversation's only turn: interleaved text and images, all text trained
TRAINED = ("assistant", DOCUMENT)
CALL = "tool_call"  # the role of a turn whose text is a call, or a list of calls; it becomes a reply's
ROLES = {  # as people name it, in any case -> the role
    DOCUMENT: DOCUMENT,
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    CALL: CALL,
    "function_call": CALL,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "environment": "tool",
}
WEIGHTS = ("loss", "weight")  # the first that a turn has counts
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")  # beside a reply's content
THINK, END_OF_THINKING = "<think>", "</think>"
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # besides 0


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


def named_weight(turn: dict, index: int) -> float | None:
    """The weight in the loss that a turn names, as `loss` or as OpenAI's `weight`, or None; true is 1.

    Raises BadSample for a wrong one, and for two that differ.
    """
    named = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    for key, value in named.items():
        if not (isinstance(value, int | float) and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)):
            wanted = f"true, false or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
            raise BadSample("bad_conversation", f"turn {index} has {key} {value!r}, not {wanted}")
    weights = set(map(float, named.values()))
    if len(weights) > 1:
        raise BadSample("bad_conversation", f"turn {index} has {' and '.join(WEIGHTS)}, which differ")
    return weights.pop() if weights else None


def is_trained(turn: dict) -> bool:
    """Whether a clean turn is a reply to train on."""
    return turn["role"] in TRAINED and turn.get("loss", 1) > 0


def last_reply_alone(messages: list[dict]) -> list[dict]:
    """The messages, of which no trained reply but the last is trained."""
    last = max((index for index, message in enumerate(messages) if is_trained(message)), default=0)
    return [
        message | {"loss": 0.0} if message["role"] == "assistant" and index != last else message
        for index, message in enumerate(messages)
    ]


def without_thinking(turn: dict) -> dict:
    """The turn; a reply without the thinking blocks in its text, and without THINKING_KEYS."""
    if turn["role"] != "assistant":
        return turn

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
