"""Special tokens by their role: found in a tokenizer, named by the user, or added."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from typing import Any

from tokenizers import AddedToken

from megatron_vlm.config import ConfigError

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
    for role, what in chain(_not_alone(tokenizer, tokens), _collisions(tokenizer, tokens)):
        raise ConfigError(_remedied(role, tokens[role], what))
    whole_words = {each.content for each in _added(tokenizer) if each.special and not each.single_word}
    tokenizer.add_tokens(  # a present one keeps its id, and is found wherever it stands
        [AddedToken(new, special=True, normalized=False) for new in tokens.values() if new not in whole_words]
    )
    tokenizer.pad_token = tokens["pad"]
    assigned = []
    for role, token in tokens.items():
        how = ADDED if token not in before else GIVEN if role in named else FOUND
        assigned.append(RoleToken(role, token, _only_id(tokenizer, role, token), how))
    return assigned


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


def _not_alone(tokenizer: Any, tokens: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Roles whose token is ordinary text, with what it is."""
    vocabulary = tokenizer.get_vocab()
    added = {each.content for each in _added(tokenizer)}
    for role, token in tokens.items():
        if token not in vocabulary and not re.search(r"[^\w\s]", token):
            yield role, "is a word, which texts would then lose"
        if token in vocabulary and token not in added:
            ids = tokenizer.encode(token, add_special_tokens=False)
            is_piece = f"is a piece of ordinary text (id {ids[0]})"
            yield role, is_piece if len(ids) == 1 else f"splits into the ids {ids}"


def _collisions(tokenizer: Any, tokens: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Roles whose token has another meaning already, with that."""
    for (other, taken), (role, token) in combinations(tokens.items(), 2):
        if token == taken and {role, other} == {"pad", "end_of_turn"}:
            yield "pad", "is also the end of a turn, which would then never be trained as such"
        elif token == taken:
            yield role, f"is the token of {other} already"
    for (role, token), (other, outer) in permutations(tokens.items(), 2):
        if token in outer:  # processors count the image token in text
            yield role, f"is part of {outer}, the token of {other}"
    for role, token in tokens.items():
        for name in ("bos_token", "eos_token", "unk_token"):
            may_be = role in NAMED and (role, name) != ("pad", "bos_token")
            if token == getattr(tokenizer, name) and not may_be:
                yield role, f"is the tokenizer's {name} already"


def _only_id(tokenizer: Any, role: str, token: str) -> int:
    """The one id that the token has wherever it stands, and that no other token has."""
    (first, *rest) = tokenizer.encode(token, add_special_tokens=False)
    if rest:
        raise ConfigError(_remedied(role, token, f"splits into the ids {[first, *rest]}"))
    text = f"a{token}b{token}{token}"
    if tokenizer.encode(text, add_special_tokens=False).count(first) != text.count(token):
        raise ConfigError(_remedied(role, token, f"is not found in {text!r}"))
    if others := {name for name, i in tokenizer.get_vocab().items() if i == first} - {token}:
        raise ConfigError(_remedied(role, token, f"gets the id {first}, which {min(others)} has"))
    return first


def _remedied(role: str, token: str, what: str) -> str:
    return (
        f"special token of role {role}: {token} {what}; give another, one that the tokenizer "
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
            f"embedding, such as {token} (id {highest}); put the tokenizer of that very model "
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
