"""The tiny Kimi K2.5: Qwen's tokenizer with Kimi's markers, MoonViT, and DeepSeek-V3's text model."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken
from transformers import Kimi_K25Config, Kimi_K25ImageProcessor, Kimi_K25Processor, Kimi_K25VideoProcessor

from tiny import qwen, texts
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {
    "image_token": "<|media_pad|>",
    "media_begin_token": "<|media_begin|>",
    "media_content_token": "<|media_content|>",
    "media_end_token": "<|media_end|>",
}
VIDEO = "<|kimi_k25_video_placeholder|>"


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 112,
    most_patches: int = 48,
    vocab_size: int = 512,
) -> Kimi_K25Processor:
    """`image_size` is the longest edge in pixels / 14 * 14; images are scaled down to `most_patches`.

    The token of videos comes behind all others, as in the published tokenizer.
    """
    tokenizer = qwen.tokenizer(corpus, vocab_size, MARKERS)
    tokenizer.add_tokens([AddedToken(VIDEO, special=True, normalized=False)])
    settings = {
        "max_patches": most_patches,
        "size": {"max_height": image_size // 14, "max_width": image_size // 14},
    }
    return Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(**settings),
        video_processor=Kimi_K25VideoProcessor(**settings),
        tokenizer=tokenizer,
        chat_template=template,
    )


def config(processor: Kimi_K25Processor, text: dict, vision: dict) -> Kimi_K25Config:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model. The
    token of videos has no row of the embedding, as published."""
    tower = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": processor.image_processor.patch_size,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
        **vision,
    }
    return Kimi_K25Config(
        **texts.whole(processor.tokenizer, "deepseek_v3", {"vocab_size": processor.video_token_id} | text),
        vision_config=tower,
        projection_hidden_size=tower["hidden_size"],
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.tokenizer.media_begin_token_id,
        vision_end_token_id=processor.tokenizer.media_end_token_id,
    )


FAMILY = TinyFamily(
    qwen.template(
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        video=VIDEO + "\n",
    ),
    processor,
    config,
    demo={
        "image_size": 56,
        "text": {**DEMO_TEXT, "moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "vision": DEMO_TOWER,
    },
    published={"image_size": 512 * 14, "most_patches": 16384},
    variants={
        "groups of experts, tied": {
            "text": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
                "n_group": 2,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": True,
            }
        },
    },
)
