"""The language model's tokenizer, read from any of its files and written so that it stays the same.

Also a chat template in the style of its control tokens, which writes images and marks replies.
"""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import set_verbosity_error

from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_text, write_whole
from megatron_vlm.messages import reading

SETTINGS_FILE = "tokenizer_config.json"
WITHOUT_PACKAGE = ("tokenizer.json", "vocab.json", "tekken.json")  # files that Transformers reads by itself
# what tokenizer_config.json says besides tokenizer.json, and does not change how text becomes ids
KEPT = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
KEPT += ["extra_special_tokens", "model_max_length", "clean_up_tokenization_spaces", "model_input_names"]


@reading("folder")
def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, which neither cuts nor pads texts. Raises ConfigError if a package lacks."""
    set_verbosity_error()
    if not any((folder / name).is_file() for name in WITHOUT_PACKAGE) and not find_spec("sentencepiece"):
        raise ConfigError(
            f"--language-model {folder}: its tokenizer.model needs the package sentencepiece, "
            "which is not installed; pip install sentencepiece, or put the model's tokenizer.json there."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):  # mistral-common's, to which nothing can be added
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, names: Mapping[str, str]) -> Any:
    """Write the tokenizer, and return it as Transformers reads it back; `names` are attributes that it gets.

    Classes made for one model build themselves from parts of tokenizer.json and settings, of which saving
    loses some: LlamaTokenizer forgets `legacy`, and then cuts the text after special tokens in another way.
    Here the class is the one that takes tokenizer.json as it stands.
    """
    tokenizer.save_pretrained(folder)
    file = folder / SETTINGS_FILE
    settings = json.loads(read_text(file))
    kept = {key: settings[key] for key in KEPT if key in settings}
    kept |= {"tokenizer_class": "TokenizersBackend", "padding_side": tokenizer.padding_side}
    write_whole(file, json.dumps(kept, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **names)


def refuse_changed(before: Any, after: Any) -> None:
    """Raises ConfigError unless both make the same ids of every text."""
    mine, theirs = (json.loads(each.backend_tokenizer.to_str()) for each in (before, after))
    for name, rule in mine.items():
        if name not in ("truncation", "padding") and rule != theirs.get(name):
            raise ConfigError(
                f"Transformers reads the tokenizer that it has written back with another {name}, and would "
                "then make other ids of texts; give a language model with another tokenizer.json."
            )


def begins_texts(tokenizer: Any) -> str:
    """The token that stands before a conversation: the tokenizer puts it before texts, or its own chat
    template writes it; else nothing."""
    begin = tokenizer.bos_token
    ids = tokenizer.encode("a")
    is_first = bool(ids) and ids[0] == tokenizer.bos_token_id
    return begin if begin and (is_first or "bos_token" in own_template(tokenizer)) else ""


def own_template(tokenizer: Any) -> str:
    """The chat templates that come with the tokenizer, one after another."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


# -- the chat template

_BODY = """{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}{{ $image }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- else -%}{{ raise_exception('This template writes texts and images, and nothing else!') }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{ raise_exception('This template writes no tools!') }}{%- endif -%}
{{ $begin }}
{%- for message in messages -%}
    {%- if message['role'] not in ('system', 'user', 'assistant') -%}
        {{ raise_exception('This template writes system, user and assistant turns, and no others!') }}
    {%- endif -%}
"""
_HEADERS = (
    _BODY
    + """    {{ $before + message['role'] + $after }}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{ body(message['content']) + $end }}{%- endgeneration -%}
    {%- else -%}
        {{ body(message['content']) + $end }}
    {%- endif -%}
    {{ $between }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ $before + 'assistant' + $after }}{%- endif -%}
"""
)
_INST = (
    _BODY
    + """    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{ $space + body(message['content']) + $end }}{%- endgeneration -%}
    {%- else -%}
        {%- if message['role'] == 'system' and not loop.first -%}
            {{ raise_exception('A system turn comes first!') }}
        {%- endif -%}
        {{ ($system if message['role'] == 'system' else '[INST]') + $space + body(message['content']) }}
        {{- $space + ($system_end if message['role'] == 'system' else '[/INST]') }}
    {%- endif -%}
{%- endfor -%}
"""
)


def chat_template(knows: Callable[[str], bool], image: str, end: str, begin: str) -> str:
    """A template in the style whose control tokens the tokenizer knows: Llama 3's, ChatML or Mistral's.
    Without any of them, the roles' names stand before the turns. `begin` stands before the conversation."""
    quoted = {name: json.dumps(text) for name, text in (("image", image), ("end", end), ("begin", begin))}
    if knows("<|start_header_id|>"):
        style = {"before": "<|start_header_id|>", "after": "<|end_header_id|>\n\n", "between": ""}
    elif knows("<|im_start|>"):
        style = {"before": "<|im_start|>", "after": "\n", "between": "\n"}
    elif knows("[INST]"):
        brackets = (
            ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]") if knows("[SYSTEM_PROMPT]") else ("[INST]", "[/INST]")
        )
        style = dict(zip(("system", "system_end"), brackets, strict=True))
        return _filled(_INST, quoted, style | {"space": " " if knows("[INST] ") else ""})
    else:
        style = {"before": "", "after": ":\n", "between": "\n"}
    return _filled(_HEADERS, quoted, style)


def _filled(template: str, quoted: dict[str, str], style: dict[str, str]) -> str:
    return Template(template).substitute(quoted | {name: json.dumps(text) for name, text in style.items()})
