"""The tiny Gemma3: tokenizer, processor and config with everything the real one has, at toy size."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from itertools import cycle, islice

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor, GemmaTokenizer

from tiny.family import DEMO_TEXT, TinyFamily

BASE_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
TURN_MARKERS = ["<start_of_turn>", "<end_of_turn>"]
IMAGE_MARKERS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
LAYER_PATTERN = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")

# Renders as the published Gemma3 template does; the generation block ends with the end-of-turn token.
TEMPLATE = """{{ bos_token }}
{%- set ns = namespace(prefix='') -%}
{%- macro body(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}<start_of_image>
            {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.prefix = body(messages[0]['content']) + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<start_of_turn>model\\n' }}
        {%- generation -%}{{ body(message['content']) + '<end_of_turn>' }}{%- endgeneration -%}
        {{ '\\n' }}
    {%- else -%}
        {{ '<start_of_turn>' + message['role'] + '\\n' + (ns.prefix if loop.first else '') }}
        {{- body(message['content']) + '<end_of_turn>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""


def tokenizer(
    corpus: Iterable[str],
    vocab_size: int = 768,
    markers: dict[str, str] = IMAGE_MARKERS,
    turns: Iterable[str] = TURN_MARKERS,
) -> GemmaTokenizer:
    """A byte-fallback BPE in which digits, newlines and word starts are pieces of their own, as in Gemma."""
    bpe = Tokenizer(models.BPE(fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: GemmaTokenizer keeps vocabulary and merges, so merges must not cross these cuts.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+|[0-9]"), behavior="isolated"),
            pre_tokenizers.Split("▁", behavior="merged_with_next"),
        ]
    )
    bytes_256 = [f"<0x{byte:02X}>" for byte in range(256)]
    printable = [char for char in string.printable if char.isprintable() and char != " "]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=BASE_SPECIALS + bytes_256,
        initial_alphabet=["▁", "\n", *printable],
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    result = GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        add_bos_token=True,
        padding_side="left",
        extra_special_tokens=markers,
    )
    result.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in turns])
    return result


def processor(
    corpus: Iterable[str], template: str, image_size: int = 112, image_tokens: int = 16, vocab_size: int = 768
) -> Gemma3Processor:
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": image_size, "width": image_size}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer(corpus, vocab_size),
        chat_template=template,
        image_seq_length=image_tokens,
    )


def config(processor: Gemma3Processor, text: dict, vision: dict) -> Gemma3Config:
    """`text` and `vision` override the toy sizes; `layer_types` repeats the pattern unless given."""
    vocab = processor.tokenizer
    ids = vocab.convert_tokens_to_ids
    layers = text.get("num_hidden_layers", len(LAYER_PATTERN))
    text_config = {
        "vocab_size": -(-len(vocab) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 4096,
        "sliding_window": 24,
        "layer_types": list(islice(cycle(LAYER_PATTERN), layers)),
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": vocab.pad_token_id,
        "bos_token_id": vocab.bos_token_id,
        "eos_token_id": vocab.eos_token_id,
    }
    vision_config = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": processor.image_processor.size["height"],
        "patch_size": 14,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config={"model_type": "gemma3_text", **text_config, **text},
        vision_config=vision_config | vision,
        mm_tokens_per_image=processor.image_seq_length,
        boi_token_index=ids(IMAGE_MARKERS["boi_token"]),
        eoi_token_index=ids(IMAGE_MARKERS["eoi_token"]),
        image_token_index=ids(IMAGE_MARKERS["image_token"]),
        tie_word_embeddings=True,
        eos_token_id=[vocab.eos_token_id, ids("<end_of_turn>")],
        pad_token_id=vocab.pad_token_id,
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "image_size": 56,
        "image_tokens": 4,
        "text": {**DEMO_TEXT, "sliding_window": 128},
        "vision": {"hidden_size": 96, "intermediate_size": 192, "patch_size": 28},
    },
    published={"image_size": 896, "image_tokens": 256},
)
