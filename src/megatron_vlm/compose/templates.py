"""Chat templates that write images and mark replies, in the style of the tokenizer's control tokens."""

import json
from collections.abc import Callable
from string import Template

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
