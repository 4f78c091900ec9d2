"""The language model's tokenizer with a special token for each role, and its chat template with images."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TokenizersBackend

from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_text
from megatron_vlm.inputs import attribute_errors_to

# Spellings of published tokenizers: Qwen's, Llama's, Mistral's, LFM2's, and those that other models took over
KNOWN = {
    "image": ("<|image_pad|>", "<image>", "[IMG]", "<|image|>"),
    "image_start": ("<|vision_start|>", "<|image_start|>"),
    "image_end": ("<|vision_end|>", "<|image_end|>", "[IMG_END]"),
    "row_break": ("[IMG_BREAK]",),
    "pad": ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>"),
    "end_of_turn": ("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>"),
}
ATTRIBUTES = {"pad": "pad_token", "end_of_turn": "eos_token"}  # where a tokenizer says its token of a role
PROCESSOR_ROLES = ("image", "image_start", "image_end")  # whose tokens processors ask the tokenizer for


TEMPLATE = Path(__file__).with_name("chat_template.jinja")  # in terms of a `style`


@dataclass(frozen=True)
class RoleToken:
    """The token of a role; `how` it came: found in the tokenizer, named by the user, or added."""

    role: str
    token: str
    id: int
    how: str


@attribute_errors_to("folder")
def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, which neither cuts nor pads texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):  # mistral-common's, to which nothing can be added
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def to_backend(tokenizer: Any, tokens: Iterable[RoleToken]) -> TokenizersBackend:
    """Return the tokenizer in the class that takes tokenizer.json as it stands, without a chat template.

    Classes made for one model build themselves from parts of tokenizer.json and settings, of which saving
    loses some: LlamaTokenizer forgets `legacy`, and then cuts the text after special tokens in another way.
    """
    of_processor = {f"{token.role}_token": token.token for token in tokens if token.role in PROCESSOR_ROLES}
    return TokenizersBackend(
        tokenizer_object=tokenizer.backend_tokenizer,
        padding_side=tokenizer.padding_side,
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        model_input_names=tokenizer.model_input_names,
        **tokenizer.special_tokens_map,
        **of_processor,
    )


def assign(tokenizer: Any, roles: Mapping[str, str], token_names: Mapping[str, str]) -> list[RoleToken]:
    """Return the token of each role, added to the tokenizer if it has none; no present token changes its id.

    Args:
        tokenizer: The language model's.
        roles: Role -> the token that is added if the tokenizer knows none for it.
        token_names: Role -> the token that the user names.

    Raises:
        ConfigError: A role is not needed; a token is text, has several ids or another meaning.
    """
    for role in token_names:
        if role not in roles:
            raise ConfigError(
                f"--token {role}: a model with this tower has no such token; it has {', '.join(roles)}."
            )
    vocabulary = tokenizer.get_vocab()
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokens = {
        role: token_names.get(role) or _present(tokenizer, role, added) or new for role, new in roles.items()
    }
    for role in tokens:
        if problem := _misuse(tokenizer, tokens, role, vocabulary, added):
            raise _refusal(role, tokens[role], problem)
    # a present token keeps its id, becomes special, and is then found wherever it stands
    whole_words = {text for text, token in added.items() if token.special and not token.single_word}
    tokenizer.add_tokens(
        [AddedToken(new, special=True, normalized=False) for new in tokens.values() if new not in whole_words]
    )
    tokenizer.pad_token = tokens["pad"]
    return [
        RoleToken(
            role,
            token,
            _only_id(tokenizer, role, token),
            "added" if token not in vocabulary else "named" if role in token_names else "found",
        )
        for role, token in tokens.items()
    ]


def _present(tokenizer: Any, role: str, added: Iterable[str]) -> str | None:
    """The token that the tokenizer has for a role."""
    attribute = getattr(tokenizer, ATTRIBUTES[role]) if role in ATTRIBUTES else None
    if role == "pad" and attribute:
        return attribute
    return next((token for token in KNOWN[role] if token in added), attribute)


def _misuse(
    tokenizer: Any, tokens: Mapping[str, str], role: str, vocabulary: Iterable[str], added: Iterable[str]
) -> str | None:
    """Why the token of a role is ordinary text or has another meaning already; None if it serves."""
    token = tokens[role]
    if token not in vocabulary and not re.search(r"[^\w\s]", token):
        return "is a word, which texts would then lose"
    if token in vocabulary and token not in added:
        return "is a piece of ordinary text"
    if role == "pad" and token == tokens["end_of_turn"]:
        return "is also the end of a turn, which would then never be trained as such"
    for other, spelled in tokens.items():
        if other != role and token in spelled:  # processors count the image token in text
            return f"is part of {spelled}, the token of {other}"
    for name in ("bos_token", "eos_token", "unk_token"):
        may_be = role in ATTRIBUTES and (role, name) != ("pad", "bos_token")
        if token == getattr(tokenizer, name) and not may_be:
            return f"is the tokenizer's {name} already"
    return None


def _only_id(tokenizer: Any, role: str, token: str) -> int:
    """The id that the token has wherever it stands, and that no other token has. Raises ConfigError."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    text = f"a{token}b{token}{token}"
    if tokenizer.encode(text, add_special_tokens=False).count(token_id) != 3:
        raise _refusal(role, token, f"is not one id wherever it stands, as in {text!r}")
    if same_id := {name for name, i in tokenizer.get_vocab().items() if i == token_id} - {token}:
        raise _refusal(role, token, f"gets the id {token_id}, which {min(same_id)} has")
    return token_id


def _refusal(role: str, token: str, problem: str) -> ConfigError:
    return ConfigError(
        f"special token of role {role}: {token} {problem}; give another, one that the tokenizer lacks or "
        f"reserves: --token '{role}=<|{role}|>'."
    )


def grown_rows(tokenizer: Any, tokens: Iterable[RoleToken], rows: int, multiple: int | None) -> int:
    """Return how many rows embedding and output layer get: never fewer; a `multiple`, by default of 64, if
    they grow.

    Raises:
        ConfigError: The tokenizer has ids beyond `rows` that are not among `tokens`.
    """
    role_ids = {token.id for token in tokens}
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows and i not in role_ids}
    if beyond:
        highest = max(beyond, key=beyond.get)
        raise ConfigError(
            f"the tokenizer has {len(beyond)} tokens beyond the {rows} rows of the language model's "
            f"embedding, such as {highest} (id {beyond[highest]}); put the tokenizer of that very model "
            "into its folder."
        )
    needed = max(rows, max(role_ids) + 1)
    if needed == rows and multiple is None:
        return rows
    step = multiple or 64
    return -(-needed // step) * step


def refuse_changed(before: Any, after: Any) -> None:
    """Raise ConfigError unless both tokenizers make the same ids of every text."""
    rules_after = json.loads(after.backend_tokenizer.to_str())
    for name, rule in json.loads(before.backend_tokenizer.to_str()).items():
        if name not in ("truncation", "padding") and rule != rules_after.get(name):
            raise ConfigError(
                f"Transformers reads the tokenizer that it has written back with another {name}, and would "
                "then make other ids of texts; give a language model with another tokenizer.json."
            )


def chat_template(tokenizer: Any, image: str, end: str) -> str:
    """Return a template in the style whose control tokens the tokenizer or its own chat template knows.

    Llama 3's, ChatML or Mistral's; without any of them, the roles' names stand before the turns. What begins
    a conversation is what the tokenizer puts before texts, or what its own chat template writes.
    """
    vocabulary = tokenizer.get_vocab()
    templates = tokenizer.chat_template or ""
    source = templates if isinstance(templates, str) else "\n".join(templates.values())

    def knows(text: str) -> bool:
        return text in vocabulary or text in source

    # the control tokens show which style the language model was trained on
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] or "bos_token" in source
    style = {"image": image, "begin": (begins and tokenizer.bos_token) or "", "space": "", "between": ""}
    roles = ("system", "user", "assistant")
    if knows("[INST]") and not (knows("<|start_header_id|>") or knows("<|im_start|>")):
        # the system turn has brackets of its own in newer models, and is a question in older ones
        space = " " if knows("[INST] ") else ""
        question = ["[INST]", f"{space}[/INST]"]
        system = ["[SYSTEM_PROMPT]", f"{space}[/SYSTEM_PROMPT]"] if knows("[SYSTEM_PROMPT]") else question
        style |= {"space": space, "prompt": ""}
        style["marks"] = {"system": system, "user": question, "assistant": ["", end]}
    else:
        header = "{}:\n"
        if knows("<|start_header_id|>"):
            header = "<|start_header_id|>{}<|end_header_id|>\n\n"
        elif knows("<|im_start|>"):
            header = "<|im_start|>{}\n"
        style |= {"between": "" if "header" in header else "\n", "prompt": header.format("assistant")}
        style["marks"] = {role: [header.format(role), end] for role in roles}
    return f"{{%- set style = {json.dumps(style)} -%}}\n{read_text(TEMPLATE)}"
