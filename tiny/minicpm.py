"""The tiny MiniCPM-V 4.6 and 4.7: Qwen's tokenizer with markers around slices, and Qwen3.5's text model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import (
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    PretrainedConfig,
    ProcessorMixin,
)

from tiny import qwen
from tiny.family import DEMO_TOWER, TinyFamily

MARKERS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
# Transformers begins these with a scale of 1, as if the tower's width were 1
FACTORS = {f"vit_merger.self_attn.{name}_proj.weight": 0.125 for name in ("q", "k", "v", "out")}
FACTORS |= {"vit_merger.linear_1.weight": 0.125, "vit_merger.linear_2.weight": 0.25}
# The published one puts a line's end between an image and what follows.
TEMPLATE = qwen.template(image="<|image_pad|>\n", video="<|video_pad|>\n")


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 112,
    most_slices: int = 4,
    merge: str = "16x",
    vocab_size: int = 512,
    kind: type[ProcessorMixin] = MiniCPMV4_6Processor,
) -> ProcessorMixin:
    """`image_size` is the side of a square with about as many pixels as the whole image and a slice have."""
    settings = {
        "scale_resolution": image_size,
        "max_slice_nums": most_slices,
        "downsample_mode": merge,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return kind(
        image_processor=MiniCPMV4_6ImageProcessor(**settings),
        video_processor=MiniCPMV4_6VideoProcessor(**settings),
        tokenizer=qwen.tokenizer(corpus, vocab_size, MARKERS),
        chat_template=template,
    )


def config(
    kind: type[PretrainedConfig], processor: ProcessorMixin, text: dict, vision: dict, **more: Any
) -> PretrainedConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model."""
    images, tied = processor.image_processor, text.get("tie_word_embeddings", True)
    tower = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 8 * images.patch_size,
        "patch_size": images.patch_size,
        **vision,
    }
    return kind(
        text_config=qwen.qwen3_5_text(processor) | {"model_type": "qwen3_5_text"} | text,
        vision_config=tower,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        insert_layer_id=tower.pop("insert_layer_id", 1),
        downsample_mode=images.downsample_mode,
        tie_word_embeddings=tied,
        eos_token_id=processor.tokenizer.eos_token_id,
        **more,
    )


def family(processor: Any, config: Any) -> TinyFamily:
    return TinyFamily(
        TEMPLATE,
        processor,
        config,
        demo={
            "most_slices": 1,
            "text": qwen.QWEN3_5_DEMO_TEXT,
            "vision": {**DEMO_TOWER, "num_hidden_layers": 2, "insert_layer_id": 0},
        },
        published={"image_size": 448, "most_slices": 9},
        variants={
            "more tokens of an image, untied": {"merge": "4x", "text": {"tie_word_embeddings": False}},
        },
        factors=FACTORS,
    )
