"""The tiny SmolVLM2: squares of an image and the whole image, SigLIP's tower, turns without start tokens."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from tiny import qwen, texts
from tiny.byte_level import byte_level_bpe
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
MOST_A_SIDE = 6  # squares that have a token
TEMPLATE = """{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}{{ '<image>' }}
            {%- elif part['type'] == 'video' -%}{{ '<video>' }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{ '<|im_start|>' }}
{%- for message in messages -%}
    {{ message['role'] | capitalize + ':' }}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{ ' ' + body(message['content']) + '<end_of_utterance>' }}{%- endgeneration -%}
    {%- else -%}
        {{ ' ' if message['content'] is string or message['content'][0]['type'] != 'image' }}
        {{- body(message['content']) + '<end_of_utterance>' }}
    {%- endif -%}
    {{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""


def tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a token for the place of each square; a video has none."""
    numbers = range(1, MOST_A_SIDE + 1)
    places = [f"<row_{row}_col_{column}>" for row in numbers for column in numbers]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKERS.values(), *places]
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(corpus, qwen.PIECES, vocab_size, specials),
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        extra_special_tokens=MARKERS,
        padding_side="right",
    )


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 56,
    image_tokens: int = 4,
    most_a_side: int = 3,
    vocab_size: int = 512,
) -> SmolVLMProcessor:
    """`image_size` is a square's side, of which the longer side of an image has `most_a_side`; a square has
    `image_tokens`."""
    sizes = {"max_image_size": {"longest_edge": image_size}}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size={"longest_edge": most_a_side * image_size}, **sizes),
        video_processor=SmolVLMVideoProcessor(size={"longest_edge": image_size}, **sizes),
        tokenizer=tokenizer(corpus, vocab_size),
        image_seq_len=image_tokens,
        chat_template=template,
    )


def config(processor: SmolVLMProcessor, text: dict, vision: dict) -> SmolVLMConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model."""
    vision_config = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": processor.image_processor.max_image_size["longest_edge"],
        "patch_size": 14,
        **vision,
    }
    patches = vision_config["image_size"] // vision_config["patch_size"]
    return SmolVLMConfig(
        **texts.whole(processor.tokenizer, "llama", text),
        vision_config=vision_config,
        image_token_id=processor.image_token_id,
        scale_factor=round(patches / processor.image_seq_len**0.5),
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "most_a_side": 1,
        "text": {**DEMO_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        "vision": DEMO_TOWER,
    },
    published={"image_size": 384, "image_tokens": 81, "most_a_side": 4},
    variants={
        "one feature of a square, tied": {
            "image_tokens": 1,
            "text": {"tie_word_embeddings": True, "attention_bias": True},
        }
    },
)
