"""Special tokens by their role: found in a tokenizer, named by the user, or added."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from tokenizers import AddedToken

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable

# Spellings of published tokenizers: Qwen's, Llama's, Mistral's, LFM2's, and those that other models took over
KNOWN = {
    "image": ("<|image_pad|>", "<image>", "[IMG]", "<|image|>"),
    "image_start": ("<|vision_start|>", "<|image_start|>"),
    "image_end": ("<|vision_end|>", "<|image_end|>", "[IMG_END]"),
    "row_break": ("[IMG_BREAK]",),
    "pad": ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>"),
    "end_of_turn": ("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>"),
}
NAMED = {"pad": "pad_token", "end_of_turn": "eos_token"}  # what a tokenizer says itself about a role
FOUND, GIVEN, ADDED = "found", "named", "added"


@dataclass(frozen=True)
class RoleToken:
    """The token of a role; `how` it came: found in the tokenizer, named by the user, or added."""

    role: str
    token: str
    id: int
    how: str


def assign(tokenizer: Any, roles: Mapping[str, str], named: Mapping[str, str]) -> list[RoleToken]:
    """The token of each role, added to the tokenizer where it had none; no present token changes its id.

    roles   role -> the token that is added if the tokenizer knows none for it
    named   role -> the token that the user wants

    Raises ConfigError for a role that is not needed, a token that is text, that splits into several ids or
    has another role already, and for a pad token that is also the end of a turn.
    """
    for role in named:
        if role not in roles:
            raise ConfigError(
                f"--token {role}: a model with this tower has no such token; it has {', '.join(roles)}."
            )
    before = set(tokenizer.get_vocab())
    tokens = {role: named.get(role) or _present(tokenizer, role) or new for role, new in roles.items()}
    for role, token in tokens.items():
        _refuse_text(tokenizer, role, token)
    _refuse_collisions(tokenizer, tokens)
    whole = {each.content for each in _added(tokenizer) if each.special and not each.single_word}
    tokenizer.add_tokens(  # a present one keeps its id, and is found wherever it stands
        [AddedToken(token, special=True, normalized=False) for token in tokens.values() if token not in whole]
    )
    tokenizer.pad_token = tokens["pad"]
    found = []
    for role, token in tokens.items():
        how = ADDED if token not in before else GIVEN if role in named else FOUND
        found.append(RoleToken(role, token, _only_id(tokenizer, role, token), how))
    return found


def _present(tokenizer: Any, role: str) -> str | None:
    """The token that the tokenizer has for a role."""
    own = getattr(tokenizer, NAMED[role]) if role in NAMED else None
    if role == "pad" and own:
        return own
    added = {each.content for each in _added(tokenizer)}
    return next((token for token in KNOWN[role] if token in added), own)


def _added(tokenizer: Any) -> Iterable[AddedToken]:
    """Its tokens that are no pieces of ordinary text."""
    return tokenizer.added_tokens_decoder.values()


def _refuse_text(tokenizer: Any, role: str, token: str) -> None:
    added = {each.content for each in _added(tokenizer)}
    if token not in tokenizer.get_vocab() and not re.search(r"[^\w\s]", token):
        raise ConfigError(_remedied(role, token, "is a word, which texts would then lose"))
    if token in tokenizer.get_vocab() and token not in added:
        ids = tokenizer.encode(token, add_special_tokens=False)
        what = f"splits into the ids {ids}" if len(ids) > 1 else f"is a piece of ordinary text (id {ids[0]})"
        raise ConfigError(_remedied(role, token, what))


def _refuse_collisions(tokenizer: Any, tokens: Mapping[str, str]) -> None:
    roles: dict[str, str] = {}
    for role, token in tokens.items():
        if token in roles:
            other = roles[token]
            if {role, other} == {"pad", "end_of_turn"}:
                what = "is also the end of a turn, which would then never be trained as such"
                raise ConfigError(_remedied("pad", token, what))
            raise ConfigError(_remedied(role, token, f"is the token of {other} already"))
        roles[token] = role
    for inner, outer in permutations(roles, 2):
        if inner in outer:  # processors count the image token in text
            what = f"is part of {printable(outer)}, the token of {roles[outer]}"
            raise ConfigError(_remedied(roles[inner], inner, what))
    for name in ("bos_token", "eos_token", "unk_token"):
        role = roles.get(getattr(tokenizer, name))
        if role and (role not in NAMED or (role, name) == ("pad", "bos_token")):
            token = getattr(tokenizer, name)
            raise ConfigError(_remedied(role, token, f"is the tokenizer's {name} already"))


def _only_id(tokenizer: Any, role: str, token: str) -> int:
    """The one id that the token has wherever it stands, and that no other token has."""
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(_remedied(role, token, f"splits into the ids {ids}"))
    for text in (f"a{token}b", token * 2):
        found = tokenizer.encode(text, add_special_tokens=False)
        if found.count(ids[0]) != text.count(token):
            raise ConfigError(
                _remedied(role, token, f"is not found in {text!r}, which gives the ids {found}")
            )
    if others := {name for name, i in tokenizer.get_vocab().items() if i == ids[0]} - {token}:
        raise ConfigError(_remedied(role, token, f"gets the id {ids[0]}, which {printable(min(others))} has"))
    return ids[0]


def _remedied(role: str, token: str, what: str) -> str:
    return (
        f"special token of role {role}: {printable(token)} {what}; give another, one that the tokenizer "
        f"lacks or reserves: --token '{role}=<|{role}|>'."
    )


def refuse_beyond(tokenizer: Any, assigned: Iterable[RoleToken], rows: int) -> None:
    """Raises ConfigError if the tokenizer has ids for which the language model's embedding has no row."""
    known = {each.token for each in assigned}
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows and token not in known}
    if beyond:
        token, highest = max(beyond.items(), key=lambda item: item[1])
        raise ConfigError(
            f"the tokenizer has {len(beyond)} tokens beyond the {rows} rows of the language model's "
            f"embedding, such as {printable(token)} (id {highest}); put the tokenizer of that very model "
            "into its folder."
        )


def grown_rows(assigned: Iterable[RoleToken], rows: int, multiple: int | None) -> int:
    """How many rows embedding and output layer get: never fewer, and a multiple (unless it was given, of 64)
    if they grow."""
    needed = max(rows, max(each.id for each in assigned) + 1)
    if needed == rows and multiple is None:
        return rows
    step = multiple or 64
    return -(-needed // step) * step
