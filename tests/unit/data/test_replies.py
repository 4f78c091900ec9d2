"""Replies of templates without generation tags, which write a reply differently once others follow."""

import itertools
import random

import pytest
from samples import templated

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.chat_template import ChatTemplate
from megatron_vlm.data.encode.replies import REPLY, TURN, UntaggedReplies
from tiny.checkpoints import TINY_FAMILIES, without_generation_tags
from tiny.corpus import default_corpus

# As published, with generation tags added: what follows the generation prompt, end of turn included.
BODY = """{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}
        {%- else -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""
LAST_QUERY = """{%- set ns = namespace(looking=true, last=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
    {%- set content = body(message.content) -%}
    {%- if ns.looking and message.role == 'user' and not content.startswith('<tool_response>') -%}
        {%- set ns.looking = false -%}{%- set ns.last = messages|length - 1 - loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
"""
THOUGHTS = """{%- set content = body(message.content) -%}{%- set thoughts = '' -%}
    {%- if message.reasoning_content is string -%}{%- set thoughts = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
        {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
"""
CALLS = """{%- for call in message.tool_calls or [] -%}
        {%- if (loop.first and content) or not loop.first -%}{{ '\\n' }}{%- endif -%}
        {{ '<tool_call>\\n{"name": "' + call.function.name + '"}\\n</tool_call>' }}
    {%- endfor -%}"""
TOOL = """{%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
        {{ '\\n<tool_response>\\n' + body(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
"""


def qwen(prompt, others, last):
    """A template of Qwen's form. `prompt` follows the assistant's marker in the generation prompt; `last` is
    what a reply after the last question begins with, tags included, `others` another reply."""
    return (
        BODY
        + LAST_QUERY
        + "{%- for message in messages -%}"
        + THOUGHTS
        + "{%- if message.role == 'assistant' -%}{{ '<|im_start|>assistant\\n' }}"
        + "{%- if loop.index0 > ns.last and (loop.last or thoughts) -%}"
        + last
        + "{%- else -%}"
        + others
        + "{%- endif -%}{{ '\\n' }}"
        + TOOL
        + "{%- else -%}{{ '<|im_start|>' + message.role + '\\n' + body(message.content) + '<|im_end|>\\n' }}"
        + "{%- endif -%}{%- endfor -%}"
        + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n"
        + prompt
        + "' }}{%- endif -%}"
    )


def tagged(text):
    return "{%- generation -%}" + text + "{{ content }}" + CALLS + "{{ '<|im_end|>' }}{%- endgeneration -%}"


PLAIN = tagged("")
BLOCK = "{{ thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{%- set content = content.lstrip('\\n') -%}"
SHAPES = {
    # the empty thinking block of the last reply is half in the generation prompt
    "qwen3_vl_thinking": qwen("<think>\\n", PLAIN, "{{ '<think>\\n' }}" + tagged(BLOCK)),
    # it is not in the generation prompt: the model writes it
    "qwen3": qwen("", PLAIN, tagged("{{ '<think>\\n' }}" + BLOCK)),
    # thinking is written for no reply at all, but prompted for (DeepSeek-R1)
    "always_stripped": qwen("<think>\\n", PLAIN, PLAIN),
    # the first question holds the rules, every reply but the last is trimmed and ends otherwise
    "first_and_last": BODY
    + """{%- for message in messages -%}
    {%- set content = body(message.content) -%}
    {%- if message.role == 'assistant' and loop.last -%}
        {{ '[A]' }}{%- generation -%}{{ ' ' + content }}<|im_end|>{%- endgeneration -%}
    {%- elif message.role == 'assistant' -%}
        {{ '[A]' }}{%- generation -%}{{ content | trim }}<|endoftext|>{%- endgeneration -%}{{ '\\n' }}
    {%- elif loop.first -%}{{ 'RULES ' + messages | length | string + '[U]' + content | trim }}
    {%- else -%}{{ '[U]' + content | trim }}
    {%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '[A]' }}{%- endif -%}
""",
    # no end of turn of its own: the next turn's marker ends a reply (GLM-4.5V)
    "ended_by_the_next": BODY
    + LAST_QUERY
    + "{%- for message in messages -%}"
    + THOUGHTS
    + """{%- if message.role == 'assistant' -%}{{ '<|vision_end|>' }}
        {%- generation -%}
        {{ '\\n<think>' + (thoughts.strip() if loop.index0 > ns.last else '') + '</think>\\n' -}}
        {{ content.strip() }}"""
    + CALLS
    + """{%- endgeneration -%}
    {%- else -%}{{ '<|vision_start|>' + message.role + '\\n' + body(message.content) }}
    {%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|vision_end|>' }}{%- endif -%}
""",
}
# No beginning of the conversation is a beginning of the text, so that marks alone find replies.
SHAPES["counted"] = "{{ messages | length }}" + SHAPES["qwen3_vl_thinking"]
# the end of the last reply begins as that of the others
SHAPES["closed"] = (
    BODY
    + "{{ messages | length }}{%- for message in messages -%}"
    + "{%- set content = body(message.content) -%}{{ '<|im_start|>' + message.role + '\n' }}"
    + "{%- if message.role == 'assistant' -%}{%- generation -%}{{ content }}"
    + CALLS
    + "{{ '<|im_end|>bye' if loop.last else '<|im_end|>' }}{%- endgeneration -%}"
    + "{%- else -%}{{ content + '<|im_end|>' }}{%- endif -%}"
    + "{{ '\n' if message.role != 'assistant' or not loop.last }}{%- endfor -%}"
    + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
SAID = [
    "the cat",
    "the cat",
    "",
    " \n two  words \n\n",
    "<think>\nfirst\n</think>\n\nthe cat",
    "<think></think>",
    "a<|im_end|>\n<|im_start|>assistant\nb",
    f"a{REPLY}b{TURN}c{TURN}{REPLY}",
    "[A] [U]\n</think>",
    "\n</think>\n\n",
    "<|im_start|>assistant\n<think>\n",
]


@pytest.fixture(scope="module")
def processor():
    parts = TINY_FAMILIES["qwen3_vl"]
    return parts.processor(default_corpus(), parts.template)


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, processor):
    template = SHAPES[request.param]
    return [
        ChatTemplate(templated(processor, text)) for text in (template, without_generation_tags(template))
    ]


def talk(random_):
    """A conversation of adversarial texts, with thinking, weights and calls of tools."""
    turns = [{"role": "system", "content": "Be brief."}] if random_.random() < 0.3 else []
    for _ in range(random_.randint(1, 4)):
        turns.append({"role": "user", "content": random_.choice(SAID)})
        while random_.random() < 0.3:
            calls = [{"name": name} for name in "fg"[: random_.randint(1, 2)]]
            text = random_.choice(["", "the cat", SAID[4]])
            thoughts = {"reasoning_content": "why"} if random_.random() < 0.5 and text != SAID[4] else {}
            turns.append({"role": "assistant", "content": text, "tool_calls": calls, **thoughts})
            turns += [{"role": "tool", "content": random_.choice(["12", "", "the cat"])} for _ in calls]
        turns.append({"role": "assistant", "content": random_.choice(SAID)})
        # a typed <think> may be what the generation prompt ends with; then it is not trained
        if random_.random() < 0.3 and "<think>" not in turns[-1]["content"]:
            turns[-1]["reasoning_content"] = random_.choice(["why", "<think>\n", "\n\n", "", "the cat"])
        if random_.random() < 0.2:
            turns[-1]["weight"] = random_.choice([0, 0.5])
    return turns


def test_replies_are_where_generation_tags_would_say(pair, monkeypatch):
    """Text, spans and weights, also of conversations in which marks had to show where a reply is."""
    tags, untagged = pair
    differently, marked, random_ = [], UntaggedReplies._marked, random.Random(1)
    monkeypatch.setattr(UntaggedReplies, "_marked", lambda *args: differently.append(1) or marked(*args))
    for _ in range(40):
        messages = parse_record(talk(random_)).messages
        assert untagged.render(messages) == tags.render(messages), messages
    assert len(differently) > 10


EXPECTED = {
    "qwen3_vl_thinking": ["b<|im_end|>", "d<|im_end|>", "\n</think>\n\nf<|im_end|>"],
    "qwen3": ["b<|im_end|>", "d<|im_end|>", "<think>\n\n</think>\n\nf<|im_end|>"],
    "always_stripped": ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"],
    "first_and_last": ["b<|endoftext|>", "<think>x</think>d<|endoftext|>", " f<|im_end|>"],
    "ended_by_the_next": [f"\n<think></think>\n{said}<|vision_start|>" for said in "bdf"],
}
EXPECTED["counted"] = EXPECTED["qwen3_vl_thinking"]
EXPECTED["closed"] = ["b<|im_end|>", "<think>x</think>d<|im_end|>", "f<|im_end|>bye"]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_trained_is_what_the_model_would_generate(processor, shape):
    chat = ChatTemplate(templated(processor, without_generation_tags(SHAPES[shape])))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "<think>x</think>d"}]
    turns += [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
    text, spans, _ = chat.render(parse_record(turns).messages)
    assert [text[slice(*span)] for span in spans] == EXPECTED[shape]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_marks_and_beginnings_find_the_same_replies(family):
    """Of a template that both can read."""
    parts = TINY_FAMILIES[family]
    template = without_generation_tags(parts.template)
    chat = ChatTemplate(parts.processor(default_corpus(), template))
    texts = ["the cat", "", " a \n", f"{TURN}{REPLY}", "\n\nassistant"]
    for said in itertools.product(texts, repeat=2):
        turns = [{"role": "system", "content": "Be brief."}] * (said[0] == said[1])
        turns += [{"role": "user", "content": said[1]}, {"role": "assistant", "content": said[0]}]
        messages = chat._harmless(parse_record(turns + turns[-2:] * 2).messages)
        finder = chat._untagged(None)
        text, spans = finder(messages)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index, (start, stop) in zip(replies, spans, strict=True):
            first, last = finder._marked(messages, index, text)
            assert (first, first + finder._length(text[first:last])) == (start, stop)


def counted(chat, messages):
    """How often the template is rendered for a conversation."""
    render, count = chat._render, itertools.count()
    chat._render = lambda *args, **how: (next(count), render(*args, **how))[1]
    try:
        chat.render(messages)
    finally:
        chat._render = render
    return next(count)


def test_renderings_are_few(processor):
    """One for the text, two for a reply, three more for one that is written differently; none for a reply
    that is not trained."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 4
    parts = TINY_FAMILIES["qwen3_vl"]
    plain = ChatTemplate(templated(processor, without_generation_tags(parts.template)))
    thinking = ChatTemplate(templated(processor, without_generation_tags(SHAPES["qwen3_vl_thinking"])))
    messages = parse_record(turns).messages
    assert counted(plain, messages) == 1 + 2 * 4
    assert counted(thinking, messages) == 1 + 2 + 3 * (1 + 3)  # the prompt alone shows that a reply differs
    assert counted(thinking, messages[:2]) == 1 + 2
    last = [message | {"loss": False} for message in messages[:-1]] + messages[-1:]
    assert counted(thinking, last) == 1 + 2


def test_a_conversation_whose_reply_changes_the_rest_is_dropped(processor):
    shouts = "{% if messages[3:] and '!' in messages[1].content %}loud{% endif %}"
    chat = ChatTemplate(templated(processor, shouts + without_generation_tags(SHAPES["qwen3"])))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b!"}]
    assert chat.render(parse_record(turns).messages)[1]
    with pytest.raises(BadSample, match="template_error: .*turn 1, a reply, the prompt differs around it"):
        chat.render(parse_record(turns + turns).messages)
