"""The tiny LightOnOCR: Mistral 3's images without break tokens, Qwen's tokenizer and text model."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import LightOnOcrConfig, LightOnOcrProcessor, PixtralImageProcessor

from tiny import qwen, texts
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}


def processor(
    corpus: Iterable[str], template: str, image_size: int = 224, multiple: int = 28, vocab_size: int = 512
) -> LightOnOcrProcessor:
    """`image_size` is the longest edge; an image's sides are rounded up to multiples of `multiple` pixels."""
    return LightOnOcrProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": image_size}, patch_size={"height": multiple, "width": multiple}
        ),
        tokenizer=qwen.tokenizer(corpus, vocab_size, MARKERS),
        patch_size=14,
        spatial_merge_size=2,
        chat_template=template,
    )


def config(processor: LightOnOcrProcessor, text: dict, vision: dict) -> LightOnOcrConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model."""
    vision_config = {
        "model_type": "pixtral",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": processor.image_processor.size["longest_edge"],
        "patch_size": processor.patch_size,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 1e4},
    }
    return LightOnOcrConfig(
        **texts.whole(processor.tokenizer, "qwen3", {"tie_word_embeddings": True} | text),
        vision_config=vision_config | vision,
        image_token_id=processor.image_token_id,
        spatial_merge_size=processor.spatial_merge_size,
    )


FAMILY = TinyFamily(
    qwen.template(image="<|image_pad|>", video=""),
    processor,
    config,
    demo={"image_size": 56, "text": DEMO_TEXT, "vision": DEMO_TOWER},
    published={"image_size": 1540},
)
