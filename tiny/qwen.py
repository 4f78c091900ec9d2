"""The tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one tokenizer and template; processors and configs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from string import Template

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tiny import family

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIALS += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PLAIN_MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# how the real one cuts text before merging: contractions, words, single digits, punctuation, space
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TEMPLATE = """{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}{{ $image }}
            {%- elif part['type'] == 'video' -%}{{ $video }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{ '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{ body(message['content']) + '<|im_end|>' }}{%- endgeneration -%}
    {%- else -%}
        {{ body(message['content']) + '<|im_end|>' }}
    {%- endif -%}
    {{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def template(image: str, video: str) -> str:
    """Renders as the published templates with this text for an image and a video; the generation block ends
    with the end-of-turn token."""
    return Template(_TEMPLATE).substitute(image=json.dumps(image), video=json.dumps(video))


QWEN3_TEMPLATE = template(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")))
QWEN2_5_TEMPLATE = (
    """{%- if messages[0]['role'] != 'system' -%}
    {{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
    + QWEN3_TEMPLATE
)

DEMO_TOWER = {**family.DEMO_TOWER, "depth": 2, "deepstack_visual_indexes": [0]}  # of Qwen3-VL


def tokenizer(
    corpus: Iterable[str], vocab_size: int = 512, named: dict[str, str] | None = None
) -> Qwen2Tokenizer:
    """A byte-level BPE in which digits are pieces of their own, as in Qwen; with `named` special tokens that
    are its attributes, in the place of those of Qwen's media."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    result = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        extra_special_tokens=named
        or [marker for marker in SPECIALS if marker not in ("<|im_end|>", "<|endoftext|>")],
    )
    if named:
        result.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    result.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in PLAIN_MARKERS])
    return result


def qwen2_5_processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 112,
    vocab_size: int = 512,
    kind: type[Qwen2_5_VLProcessor | Qwen2VLProcessor] = Qwen2_5_VLProcessor,
) -> Qwen2_5_VLProcessor | Qwen2VLProcessor:
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"shortest_edge": 56**2, "longest_edge": image_size**2}
    return kind(
        image_processor=Qwen2VLImageProcessor(size=dict(pixels), **patches),
        video_processor=Qwen2VLVideoProcessor(size=dict(pixels), **patches),
        tokenizer=tokenizer(corpus, vocab_size),
        chat_template=template,
    )


def qwen3_processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 128,
    vocab_size: int = 512,
    patch_size: int = 16,
) -> Qwen3VLProcessor:
    patches = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pixels = {"shortest_edge": 64**2, "longest_edge": image_size**2}
    video_pixels = {"shortest_edge": 64**2, "longest_edge": 8 * image_size**2}  # counts all frames
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **patches, **half),
        video_processor=Qwen3VLVideoProcessor(size=video_pixels, **patches),
        tokenizer=tokenizer(corpus, vocab_size),
        chat_template=template,
    )


def qwen2_config(processor: Qwen2VLProcessor, text: dict, vision: dict) -> Qwen2VLConfig:
    """`text` and `vision` override the toy sizes."""
    vision_config = {
        "depth": 3,
        "embed_dim": 48,
        "mlp_ratio": 2,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": text.get("hidden_size", 64),
    }
    text_config = _qwen2_text(processor) | {"bos_token_id": None} | text  # else one of the real vocabulary
    return _config(Qwen2VLConfig, processor, text_config, vision_config | vision)


def qwen2_5_config(processor: Qwen2_5_VLProcessor, text: dict, vision: dict) -> Qwen2_5_VLConfig:
    """`text` and `vision` override the toy sizes."""
    vision_config = {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 56,
        "out_hidden_size": text.get("hidden_size", 64),
        "fullatt_block_indexes": [1, 3],
    }
    return _config(Qwen2_5_VLConfig, processor, _qwen2_text(processor) | text, vision_config | vision)


def qwen3_config(processor: Qwen3VLProcessor, text: dict, vision: dict) -> Qwen3VLConfig:
    """`text` and `vision` override the toy sizes."""
    return _config(Qwen3VLConfig, processor, _qwen3_text(processor) | text, _qwen3_vision(text) | vision)


def qwen3_moe_config(processor: Qwen3VLProcessor, text: dict, vision: dict) -> Qwen3VLMoeConfig:
    """`text` and `vision` override the toy sizes; output weights are untied, one layer has no experts."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    }
    text_config = _qwen3_text(processor) | experts | text
    return _config(Qwen3VLMoeConfig, processor, text_config, _qwen3_vision(text) | vision, tied=False)


# of three layers each fourth would be none
QWEN3_5_DEMO_TEXT = {
    **family.DEMO_TEXT,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def qwen3_5_config(processor: Qwen3VLProcessor, text: dict, vision: dict) -> Qwen3_5Config:
    """`text` and `vision` override the toy sizes; three gated delta nets, then one attention."""
    text_config = qwen3_5_text(processor) | text
    return _config(Qwen3_5Config, processor, text_config, _qwen3_5_vision(text) | vision)


def qwen3_5_moe_config(processor: Qwen3VLProcessor, text: dict, vision: dict) -> Qwen3_5MoeConfig:
    """`text` and `vision` override the toy sizes; output weights are untied."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    }
    text_config = qwen3_5_text(processor) | experts | text
    del text_config["intermediate_size"]
    vision_config = _qwen3_5_vision(text) | vision
    return _config(Qwen3_5MoeConfig, processor, text_config, vision_config, tied=False)


def qwen3_5_text(processor: Qwen3VLProcessor) -> dict:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    delta_net = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
    }
    return _qwen3_text(processor) | delta_net | {"rope_parameters": rope}


def _qwen3_5_vision(text: dict) -> dict:
    vision = _qwen3_vision(text)
    del vision["deepstack_visual_indexes"]
    return vision


def _qwen2_text(processor: Qwen2_5_VLProcessor | Qwen2VLProcessor) -> dict:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    return _text(processor) | {"num_hidden_layers": 4, "rope_parameters": rope}


def _qwen3_text(processor: Qwen3VLProcessor) -> dict:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return _text(processor) | {"num_hidden_layers": 4, "head_dim": 32, "rope_parameters": rope}


def _qwen3_vision(text: dict) -> dict:
    return {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text.get("hidden_size", 64),
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }


def _text(processor: Qwen2_5_VLProcessor | Qwen3VLProcessor) -> dict:
    vocab = processor.tokenizer
    return {
        "vocab_size": -(-len(vocab) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": vocab.pad_token_id,
        "eos_token_id": vocab.eos_token_id,
    }


def _config(kind: type, processor, text: dict, vision: dict, tied: bool = True) -> PretrainedConfig:
    ids = processor.tokenizer.convert_tokens_to_ids
    return kind(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=tied,
        eos_token_id=ids("<|im_end|>"),
    )
