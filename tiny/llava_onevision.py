"""The tiny LLaVA-OneVision: Qwen's tokenizer, an image in tiles and as a whole, SigLIP's tower."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)

from tiny import qwen, texts
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {"image_token": "<image>", "video_token": "<video>"}

# The parts of a turn in their order; the published one writes images, then videos, then text.
TEMPLATE = qwen.template(image="<image>\n", video="<video>\n")


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 44,
    patch_size: int = 14,
    most_a_side: int = 3,
    most_tiles: int = 4,
    vocab_size: int = 512,
) -> LlavaOnevisionProcessor:
    """`image_size` is a tile's side, of which an image has up to `most_a_side` in each direction, and the
    features of at most about `most_tiles`: fewer than 3 x 3, so that features are resized."""
    size = {"height": image_size, "width": image_size}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    sides = [image_size * count for count in range(1, most_a_side + 1)]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=[[height, width] for height in sides for width in sides], **half
        ),
        video_processor=LlavaOnevisionVideoProcessor(size=size, **half),
        tokenizer=qwen.tokenizer(corpus, vocab_size, MARKERS),
        num_image_tokens=(image_size // patch_size) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=f"anyres_max_{most_tiles}",
        chat_template=template,
    )


def config(processor: LlavaOnevisionProcessor, text: dict, vision: dict) -> LlavaOnevisionConfig:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model.

    Which layers' states are features is an entry `vision_feature_layer` of `vision`.
    """
    vocab, images = processor.tokenizer, processor.image_processor
    side, patches = images.size["height"], round(processor.num_image_tokens**0.5)
    top = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": side // patches,
        "vision_use_head": False,
        **vision,
    }
    layers = top.pop("vision_feature_layer", -1)
    return LlavaOnevisionConfig(
        **texts.whole(vocab, "qwen2", text),
        vision_config=top,
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=images.image_grid_pinpoints,
        vision_aspect_ratio=processor.vision_aspect_ratio,
        vision_feature_layer=layers,
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "image_size": 28,
        "most_a_side": 1,
        "text": {**DEMO_TEXT, "use_sliding_window": False},
        "vision": DEMO_TOWER,
    },
    published={"image_size": 384, "most_a_side": 6, "most_tiles": 9},
    variants={
        "fewer features, two layers": {
            "image_size": 56,
            "most_a_side": 4,
            "most_tiles": 2,
            "text": {"tie_word_embeddings": False, "use_sliding_window": False},
            "vision": {"vision_feature_layer": [-2, 1]},
        }
    },
)
