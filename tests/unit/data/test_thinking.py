"""Thinking blocks of replies: trained as the template writes them, read and not trained, or left out."""

import re

import pytest
from megatron.energon.errors import SkipSample
from samples import sample_of

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from tiny.checkpoints import TINY_FAMILIES, without_generation_tags
from tiny.corpus import default_corpus

BLOCK = re.compile("<think>.*?</think>", re.DOTALL)
# As GLM-4.5V and the thinking Qwen3-VL do it: thinking is written after the last question alone, out of
# `reasoning_content` or of the content.
THOUGHTFUL = """{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = message['content'] | map(attribute='text') | join -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set thought = message.reasoning_content or '' -%}
        {%- if '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1] -%}
        {%- endif -%}
        {%- if loop.index0 < last.question -%}{%- set thought = '' -%}{%- endif -%}
        {{ '<|assistant|>' }}
        {%- generation -%}{{ '\\n<think>' + thought + '</think>\\n' + text | trim }}{%- endgeneration -%}
    {%- else -%}{{ '<|' + message['role'] + '|>\\n' + text }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
TURNS = [
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "<think>a dog and\n a table</think>\n\nthe cat."},
    {"role": "user", "content": "a chart?"},
    {"role": "assistant", "content": "<think>two people</think>\n\na chart.", "weight": 2},
]
WITHOUT = [turn | {"content": BLOCK.sub("", turn["content"]).strip()} for turn in TURNS]


def processor_of(family, template):
    return TINY_FAMILIES[family].processor(default_corpus(), template)


@pytest.fixture(scope="module", params=["qwen3_vl", "glm4v_moe", "qwen3_vl untagged", "glm4v_moe untagged"])
def processor(request):
    family, *untagged = request.param.split()
    template = TINY_FAMILIES[family].template
    return processor_of(family, without_generation_tags(template) if untagged else template)


@pytest.fixture(scope="module")
def thoughtful():
    return processor_of("glm4v_moe", THOUGHTFUL)


def encoded(processor, turns, thinking, **settings):
    encoder = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=512, thinking=thinking), **settings)
    sample = sample_of(turns)
    try:
        return encoder.encode_sample(sample)
    except SkipSample:
        return encoder.drops.examples()[0]["reason"]


def trained(processor, sample):
    """The text of all trained tokens."""
    return processor.tokenizer.decode(sample.labels[sample.labels != IGNORE_INDEX])


def equal(one, other):
    return all(
        getattr(one, name).equal(getattr(other, name)) for name in ("input_ids", "labels", "loss_mask")
    )


@pytest.mark.parametrize("fast", [True, False])
def test_masked_thinking_is_read_and_not_trained(processor, fast):
    kept, masked = (encoded(processor, TURNS, thinking, fast=fast) for thinking in ("keep", "mask"))
    assert masked.input_ids.equal(kept.input_ids)
    assert "two people" in trained(processor, kept)
    assert trained(processor, masked) == BLOCK.sub("", trained(processor, kept))
    still = masked.loss_mask > 0
    assert masked.loss_mask[still].equal(kept.loss_mask[still]) and set(kept.loss_mask.tolist()) == {0, 1, 2}


def test_what_a_template_makes_of_thinking_is_what_is_trained(thoughtful):
    beside = [turn | {"reasoning_content": "two people"} for turn in WITHOUT]
    for turns in (TURNS, beside):
        kept, masked = (encoded(thoughtful, turns, thinking) for thinking in ("keep", "mask"))
        text = trained(thoughtful, kept)
        assert BLOCK.findall(text) == ["<think></think>", "<think>two people</think>"]
        assert masked.input_ids.equal(kept.input_ids) and trained(thoughtful, masked) == BLOCK.sub("", text)
        assert equal(encoded(thoughtful, turns, "drop"), encoded(thoughtful, WITHOUT, "keep"))


def test_thinking_may_begin_in_the_prompt():
    """As models write it that are prompted with `<think>`."""
    template = TINY_FAMILIES["qwen3_vl"].template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    template = without_generation_tags(template).replace(
        "{{ body(message['content']) + '<|im_end|>' }}", "X", 1
    )
    template = template.replace("X", "{{ '<think>\\n' + body(message['content']) + '<|im_end|>' }}", 1)
    processor = processor_of("qwen3_vl", template)
    turns = [TURNS[0], {"role": "assistant", "content": "a dog</think>\n\nthe cat."}]
    assert trained(processor, encoded(processor, turns, "keep")).startswith("a dog</think>")
    assert trained(processor, encoded(processor, turns, "mask")) == "\n\nthe cat.<|im_end|>"
