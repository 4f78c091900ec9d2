"""The tiny GLM-4.1V, 4.5V and 4.6V: one tokenizer and template, processors and configs at toy size."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, processors
from transformers import (
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from tiny.byte_level import byte_level_bpe

# Words, up to three digits, punctuation and whitespace, as GLM-4 cuts text.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END = "<|endoftext|>"
SPECIALS = [
    *["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"],
    *["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    *["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"],
    *["<|image|>", "<|video|>", "<|begin_of_box|>", "<|end_of_box|>"],
]
PLAIN_MARKERS = ["<think>", "</think>", "/nothink", "<tool_call>", "</tool_call>"]

TEMPLATE = """[gMASK]<sop>
{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] }}
            {%- elif part['type'] == 'image' -%}<|begin_of_image|><|image|><|end_of_image|>
            {%- elif part['type'] == 'video' -%}<|begin_of_video|><|video|><|end_of_video|>
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<|assistant|>' }}
        {%- generation -%}{{ '\\n<think></think>\\n' + body(message['content']) | trim }}{%- endgeneration -%}
    {%- else -%}
        {{ '<|' + message['role'] + '|>\\n' + body(message['content']) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    bpe = byte_level_bpe(corpus, PATTERN, vocab_size)
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    result = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        extra_special_tokens=SPECIALS,
    )
    result.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in PLAIN_MARKERS])
    return result


GLM4V = (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor)


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 112,
    vocab_size: int = 512,
    kinds: tuple[type, type, type] = GLM4V,
) -> ProcessorMixin:
    """Images keep at most the pixels of a square of `image_size`, videos twice as many over all frames.

    `kinds`: the classes of the processor and of its image and video processors.
    """
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    # GLM counts pixels over time: an image counts as one temporal patch
    image_limits = {"shortest_edge": 56**2, "longest_edge": 2 * image_size**2}
    video_limits = {"shortest_edge": 56**2, "longest_edge": 4 * image_size**2}
    whole, of_images, of_videos = kinds
    return whole(
        image_processor=of_images(size=image_limits, **patches),
        tokenizer=tokenizer(corpus, vocab_size),
        video_processor=of_videos(size=video_limits, **patches),
        chat_template=template,
    )


def config(kind: type, processor: ProcessorMixin, text: dict, vision: dict) -> PretrainedConfig:
    """A config of class `kind`; `text` and `vision` override the toy sizes."""
    vocab = processor.tokenizer
    ids = vocab.convert_tokens_to_ids
    text_config = {
        "vocab_size": -(-len(vocab) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
        },
        "eos_token_id": [vocab.eos_token_id, ids("<|user|>"), ids("<|observation|>")],
        "pad_token_id": vocab.pad_token_id,
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 4,
        "image_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text.get("hidden_size", text_config["hidden_size"]),
        "intermediate_size": 96,
    }
    text_config |= text
    return kind(
        text_config=text_config,
        vision_config=vision_config | vision,
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        image_start_token_id=ids("<|begin_of_image|>"),
        image_end_token_id=ids("<|end_of_image|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
        tie_word_embeddings=False,
        eos_token_id=text_config["eos_token_id"],
        pad_token_id=vocab.pad_token_id,
    )
