"""The tiny Gemma 4: tokenizer, processor and config with everything the real one has, at toy size."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice

from transformers import Gemma4Config, ProcessorMixin
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

from tiny import gemma3
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

MARKERS = {
    **{"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    **{"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"},
}
VIDEO, BEGIN, END = "<|video|>", "<|turn>", "<turn|>"
LAYER_PATTERN = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")

TEMPLATE = """{{ bos_token }}
{%- macro body(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}<|image|>
            {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<|turn>model\\n' }}
        {%- generation -%}{{ body(message['content']) + '<turn|>' }}{%- endgeneration -%}
        {{ '\\n' }}
    {%- else -%}
        {{ '<|turn>' + message['role'] + '\\n' + body(message['content']) + '<turn|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""


def processor(
    corpus: Iterable[str],
    template: str,
    image_tokens: int = 70,
    patch_size: int = 4,
    pooled: int = 2,
    vocab_size: int = 768,
) -> Gemma4Processor:
    """An image has up to `image_tokens` tokens of `pooled` x `pooled` patches, in about its own aspect ratio;
    Transformers takes no fewer than 70."""
    sizes = {"patch_size": patch_size, "pooling_kernel_size": pooled, "max_soft_tokens": image_tokens}
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**sizes),
        tokenizer=gemma3.tokenizer(corpus, vocab_size, MARKERS, (BEGIN, END, VIDEO)),
        video_processor=Gemma4VideoProcessor(**sizes),
        chat_template=template,
        image_seq_length=image_tokens,
    )


def text_config(processor: ProcessorMixin, text: dict) -> dict:
    """The toy sizes of the text model without experts, and `text` over them."""
    vocab = processor.tokenizer
    layers = text.get("num_hidden_layers", len(LAYER_PATTERN))
    return {
        "vocab_size": -(-len(vocab) // 64) * 64,
        "hidden_size": 64,
        # 1 / sqrt(hidden_size): with 0.02 the router's scores are nearly equal, and rounding chooses experts
        "initializer_range": 0.125,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "max_position_embeddings": 4096,
        "sliding_window": 24,
        "layer_types": list(islice(cycle(LAYER_PATTERN), layers)),
        "final_logit_softcapping": 4.0,
        "use_bidirectional_attention": "vision",
        "pad_token_id": vocab.pad_token_id,
        "bos_token_id": vocab.bos_token_id,
        "eos_token_id": vocab.eos_token_id,
        **text,
    }


def whole_config(processor: ProcessorMixin) -> dict:
    """The top level of config.json."""
    vocab = processor.tokenizer
    ids = vocab.convert_tokens_to_ids
    return {
        **{f"{name}_id": ids(marker) for name, marker in MARKERS.items() if name != "eoa_token"},
        "eoa_token_index": ids(MARKERS["eoa_token"]),
        "video_token_id": ids(VIDEO),
        "tie_word_embeddings": True,
        "eos_token_id": [vocab.eos_token_id, ids(END)],
        "pad_token_id": vocab.pad_token_id,
    }


def config(processor: Gemma4Processor, text: dict, vision: dict) -> Gemma4Config:
    """`text` and `vision` override the toy sizes; `layer_types` repeats the pattern unless given. A model
    whose layers have inputs of their own has a tower for audio."""
    images = processor.image_processor
    experts = {
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    }
    vision_config = {
        "hidden_size": 48,
        "initializer_range": 0.1,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "patch_size": images.patch_size,
        "pooling_kernel_size": images.pooling_kernel_size,
        "position_embedding_size": 320,
        "standardize": True,
    }
    text = text_config(processor, experts | text)
    has_audio = text["hidden_size_per_layer_input"]
    return Gemma4Config(
        text_config={"model_type": "gemma4_text", "vocab_size_per_layer_input": text["vocab_size"], **text},
        vision_config={"model_type": "gemma4_vision", **vision_config, **vision},
        audio_config={"model_type": "gemma4_audio", **AUDIO} if has_audio else None,
        **whole_config(processor),
    )


AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}
DENSE = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
SMALL = DENSE | {  # as E2B, with each kind of layer among those that share and those that do not
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "use_bidirectional_attention": None,
}
FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={
        "patch_size": 4,
        "text": {**DEMO_TEXT, "sliding_window": 128, "num_experts": 4, "final_logit_softcapping": 30.0},
        "vision": {**DEMO_TOWER, "head_dim": 24},
    },
    published={"image_tokens": 280, "patch_size": 16, "pooled": 3},
    variants={
        "dense": {"text": DENSE},
        "dense, biased": {
            "text": DENSE
            | {"attention_bias": True, "attention_k_eq_v": False, "final_logit_softcapping": None},
            "vision": {"standardize": False},
        },
        "small": {"text": SMALL, "vision": {"use_clipped_linears": True, "standardize": False}},
        "six experts": {  # of which a token takes three
            "text": {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40}
            | {"attention_bias": True, "num_key_value_heads": 2, "attention_k_eq_v": False},
        },
    },
    # Attention scores are not divided by sqrt(head_dim); with norms of 1 they are so large that fp32 has only
    # four digits of a gradient right.
    factors={"k_norm.weight": 0.25},
)
