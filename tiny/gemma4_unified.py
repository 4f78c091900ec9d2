"""The tiny Gemma 4 12B: tokenizer, processor and config with everything the real one has, at toy size."""

from collections.abc import Iterable

from transformers import Gemma4UnifiedConfig
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)
from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.gemma4_unified.video_processing_gemma4_unified import Gemma4UnifiedVideoProcessor

from tiny import gemma3, gemma4
from tiny.family import DEMO_TEXT, TinyFamily


def processor(
    corpus: Iterable[str],
    template: str,
    image_tokens: int = 70,
    patch_size: int = 4,
    pooled: int = 2,
    vocab_size: int = 768,
) -> Gemma4UnifiedProcessor:
    """An image has up to `image_tokens` tokens, each of a patch of `pooled` x `patch_size` pixels a side."""
    sizes = {"patch_size": patch_size, "pooling_kernel_size": pooled, "max_soft_tokens": image_tokens}
    specials = (gemma4.BEGIN, gemma4.END, gemma4.VIDEO)
    return Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(**sizes),
        tokenizer=gemma3.tokenizer(corpus, vocab_size, gemma4.MARKERS, specials),
        video_processor=Gemma4UnifiedVideoProcessor(**sizes),
        chat_template=template,
        image_seq_length=image_tokens,
    )


def config(processor: Gemma4UnifiedProcessor, text: dict, vision: dict) -> Gemma4UnifiedConfig:
    """`text` and `vision` override the toy sizes; `layer_types` repeats the pattern unless given."""
    images = processor.image_processor
    vision_config = {
        "model_type": "gemma4_unified_vision",
        "patch_size": images.patch_size,
        "pooling_kernel_size": images.pooling_kernel_size,
        "mm_embed_dim": 48,
        "mm_posemb_size": 160,
        "output_proj_dims": 48,
        "initializer_range": 0.1,
    }
    audio_config = {"model_type": "gemma4_unified_audio", "audio_embed_dim": 40}
    return Gemma4UnifiedConfig(
        text_config={"model_type": "gemma4_unified_text", **gemma4.text_config(processor, text)},
        vision_config=vision_config | vision,
        audio_config=audio_config,
        **gemma4.whole_config(processor),
    )


FAMILY = TinyFamily(
    gemma4.TEMPLATE,
    processor,
    config,
    demo={
        "patch_size": 4,
        "text": {**DEMO_TEXT, "num_hidden_layers": 4, "sliding_window": 128, "final_logit_softcapping": 30.0},
        "vision": {"mm_embed_dim": 96, "output_proj_dims": 96},
    },
    published={"image_tokens": 280, "patch_size": 16, "pooled": 3},
    variants={
        "biased": {
            "text": {"attention_bias": True, "attention_k_eq_v": False, "final_logit_softcapping": None},
        },
    },
    factors={"k_norm.weight": 0.25},  # as Gemma 4's
)
