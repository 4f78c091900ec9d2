"""Preference records, as people lay them out, brought to one form: the whole conversation with the chosen
answer under `messages` or `conversations`, that with the rejected one under `rejected_messages`.

    prompt, chosen, rejected           TRL, and most datasets; without `prompt`, both of the others are whole
                                       conversations; question and instruction are prompts, too;
                                       whole conversations may also stand beside what they begin with
    conversations, chosen, rejected    LLaMA-Factory: the turns of the prompt, and one turn each
    messages, rejected_response        ms-swift: a conversation, and what might have been its last reply
    messages, rejected_messages        ms-swift: two conversations; to this all others are brought

A prompt or an answer is text, a turn, or a list of turns.
"""

from __future__ import annotations

from typing import Any

from megatron_vlm.data.chatml import BadSample, cook_chatml_sample
from megatron_vlm.data.turns import sole

CHOSEN, REJECTED = "chosen", "rejected"
REJECTED_REPLY, REJECTED_TURNS = "rejected_response", "rejected_messages"
PAIR_COLUMNS = ((CHOSEN,), (REJECTED, REJECTED_REPLY, REJECTED_TURNS))


def with_pair(
    record: dict, turns: tuple[str, ...], prompts: tuple[str, ...], queries: tuple[str, ...]
) -> dict:
    """The record in the form above; one that is no preference record as it is. The names are those under
    which a record may have turns, prompts, and what follows a prompt."""
    for name in ("chosen_images", "rejected_images"):
        if record.get(name):
            raise BadSample("bad_preference", f"{name}: both answers have to be to the same images")
    sole(record, PAIR_COLUMNS[1], "bad_preference")
    sole(record, turns, same=_same_turns)
    named = next((name for name in turns if isinstance(record.get(name), list) and record[name]), None)
    if named and not _has(record, REJECTED) and sole(record, PAIR_COLUMNS[1]):
        sole(record, (CHOSEN, named), "bad_preference", same=_same_turns)
    if isinstance(record.get(CHOSEN), str | dict | list) and (named is None or _has(record, REJECTED)):
        prompt = _turns(record[named], "user") if named else _prompt(record, prompts, queries)
        others = {name: value for name, value in record.items() if name not in (CHOSEN, REJECTED, *prompts)}
        pair = {named or turns[-1]: _answered(prompt, record[CHOSEN])}
        if _has(record, REJECTED):
            pair[REJECTED_TURNS] = _answered(prompt, record[REJECTED])
        return others | pair
    if named and _has(record, REJECTED_REPLY):
        others = {name: value for name, value in record.items() if name != REJECTED_REPLY}
        whole = _turns(record[named], "user")
        return others | {REJECTED_TURNS: whole[:-1] + _turns(record[REJECTED_REPLY], "assistant")}
    return record


def _same_turns(one: Any, other: Any) -> bool:
    """Whether two lists of turns are one conversation, in two forms."""
    try:
        return cook_chatml_sample(one) == cook_chatml_sample(other)
    except BadSample:
        return False


def _has(record: dict, name: str) -> bool:
    return record.get(name) is not None


def _prompt(record: dict, prompts: tuple[str, ...], queries: tuple[str, ...]) -> list:
    prompt, query = (record.get(sole(record, names, "bad_preference")) for names in (prompts, queries))
    if isinstance(prompt, str) and isinstance(query, str):
        prompt = f"{prompt}\n{query}"
    return [] if prompt is None else _turns(prompt, "user")


def _answered(prompt: list, answer: Any) -> list:
    """The conversation; an answer that begins with a question is a whole one, and has the prompt in it."""
    turns = _turns(answer, "assistant")
    whole = any(_role(turn) in ("system", "user", "human") for turn in turns[:1])
    whole = whole and any(_role(turn) != "system" for turn in prompt)
    return turns if whole else prompt + turns


def _role(turn: Any) -> Any:
    return turn.get("role", turn.get("from")) if isinstance(turn, dict) else None


def _turns(given: Any, role: str) -> list:
    """Text becomes a turn of `role`; turns stay as they are, for `cook_chatml_sample` to judge."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, dict):
        return [given]
    if not isinstance(given, list):
        raise BadSample(
            "bad_preference", f"an answer or a prompt is {type(given).__name__}, no text or turns"
        )
    return given
