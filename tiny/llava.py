"""The tiny LLaVA 1.5: Llama's tokenizer, CLIP's processor and tower, the states before its last layer."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    LlamaTokenizer,
    LlavaConfig,
    LlavaProcessor,
    PixtralImageProcessor,
    ProcessorMixin,
    SiglipImageProcessor,
)

from tiny import mistral3, texts
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

IMAGE = "<image>"
# Renders roles and images as the published template does, but ends a reply with the token that ends it in
# LLaVA's training data; the published one ends it with a space.
TEMPLATE = """{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}{{ '<image>\\n' }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{ 'ASSISTANT: ' }}
        {%- generation -%}{{ body(message['content']) + eos_token }}{%- endgeneration -%}
    {%- elif message['role'] == 'system' -%}{{ body(message['content']) + ' ' }}
    {%- else -%}{{ message['role'] | upper + ': ' + body(message['content']) + ' ' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}
"""


def tokenizer(corpus: Iterable[str], vocab_size: int = 768) -> LlamaTokenizer:
    """A byte-fallback BPE with words that begin with their space and digits of their own, as Llama 2's."""
    bpe = Tokenizer(models.BPE(fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    # Only for training: LlamaTokenizer keeps vocabulary and merges, so merges must not cross these cuts.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|[0-9]"), behavior="isolated"),
            pre_tokenizers.Split("▁", behavior="merged_with_next"),
        ]
    )
    printable = [char for char in string.printable if char.isprintable() and char != " "]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=["▁", *printable],
        show_progress=False,
    )
    bpe.train_from_iterator((line for line in corpus if line.strip()), trainer)
    model = json.loads(bpe.to_str())["model"]
    return LlamaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        pad_token="<pad>",
        padding_side="left",
        extra_special_tokens={"image_token": IMAGE},
    )


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 56,
    patch_size: int = 14,
    vocab_size: int = 768,
    tower: str = "clip_vision_model",
    strategy: str = "default",
) -> ProcessorMixin:
    """`tower` is the HF model type of the tower; Pixtral has Mistral's tokenizer and template. `strategy`:
    whether CLIP's class token is among the features ("full")."""
    if tower == "pixtral":
        pixtral = mistral3.processor(corpus, mistral3.TEMPLATE, image_size=image_size)
        pixtral.spatial_merge_size = 1
        assert isinstance(pixtral.image_processor, PixtralImageProcessor)
        return pixtral
    square = {"height": image_size, "width": image_size}
    if tower == "clip_vision_model":
        images = CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=square)
    else:
        images = SiglipImageProcessor(size=square)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(corpus, vocab_size),
        patch_size=patch_size,
        chat_template=template,
        image_token=IMAGE,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(tower == "clip_vision_model"),
    )


def config(processor: ProcessorMixin, text: dict, vision: dict) -> LlavaConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model.

    Which layers' states are features is an entry `vision_feature_layer` of `vision`.
    """
    vocab = processor.tokenizer
    images = processor.image_processor
    kind = {"CLIPImageProcessor": "clip_vision_model", "SiglipImageProcessor": "siglip_vision_model"}
    kind = kind.get(type(images).__name__, "pixtral")
    vision_config = {
        "model_type": kind,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": images.size.get("longest_edge") or (images.crop_size or images.size)["height"],
        "patch_size": processor.patch_size,
    }
    top = dict(vision)
    layers = top.pop("vision_feature_layer", -1 if kind == "pixtral" else -2)
    return LlavaConfig(
        **texts.whole(vocab, "llama", text),
        vision_config=vision_config | top,
        image_token_index=processor.image_token_id,
        vision_feature_layer=layers,
        vision_feature_select_strategy=getattr(processor, "vision_feature_select_strategy", "full"),
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "patch_size": 28,
        "text": {**DEMO_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "vision": DEMO_TOWER,
    },
    published={"image_size": 336},
    variants={
        "mistral, full": {
            "text": {"model_type": "mistral"},
            "vision": {"vision_feature_layer": [-2, 1]},
            "strategy": "full",
        },
        "qwen2, siglip": {
            "text": {"model_type": "qwen2"},
            "tower": "siglip_vision_model",
            "strategy": "full",
        },
        "qwen3, pixtral": {"text": {"model_type": "qwen3"}, "tower": "pixtral", "image_size": 112},
    },
)
