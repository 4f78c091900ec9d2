"""The tiny InternVL 3.5: Qwen's tokenizer, tiles and a thumbnail, the tower with its class token."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    PretrainedConfig,
    ProcessorMixin,
)

from tiny import qwen, texts
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

TEMPLATE = qwen.template(image="<IMG_CONTEXT>\n", video="<video>\n")


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 56,
    image_tokens: int = 4,
    max_patches: int = 4,
    vocab_size: int = 512,
) -> InternVLProcessor:
    """`image_size` is a tile's side, of which an image has up to `max_patches` and, if several, one more that
    shows it whole; each has `image_tokens`."""
    size = {"height": image_size, "width": image_size}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=max_patches
        ),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=qwen.tokenizer(corpus, vocab_size, MARKERS),
        image_seq_length=image_tokens,
        chat_template=template,
    )


def config(
    processor: ProcessorMixin, text: dict, vision: dict, kind: type = InternVLConfig
) -> PretrainedConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model."""
    vocab = processor.tokenizer
    side = processor.image_processor.size["height"]
    vision_config = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "image_size": [side, side],
        "patch_size": [14, 14],
    }
    patches = (vision_config | vision)["image_size"][0] // (vision_config | vision)["patch_size"][0]
    return kind(
        **texts.whole(vocab, "qwen3", text),
        vision_config=vision_config | vision,
        image_token_id=processor.image_token_id,
        image_seq_length=processor.image_seq_length,
        downsample_ratio=processor.image_seq_length**0.5 / patches,
    )


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "max_patches": 1,
        "text": DEMO_TEXT,
        "vision": DEMO_TOWER,
    },
    published={"image_size": 448, "image_tokens": 256, "max_patches": 12},
    variants={
        "qwen2": {
            # as InternVL3's; max_position_embeddings are as many as data.seq_length by default
            "text": {"model_type": "qwen2", "rope_parameters": DYNAMIC, "max_position_embeddings": 4096},
            "image_tokens": 1,
            "vision": {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
        }
    },
)
