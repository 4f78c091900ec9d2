"""The tiny SigLIP2 and Llama 3 in LFM2-VL's class: tokenizer, processor and config, at toy size."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import processors
from transformers import CONFIG_MAPPING, Lfm2VlConfig, PreTrainedTokenizerFast
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from tiny import texts
from tiny.byte_level import byte_level_bpe
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

# As Llama 3 cuts text, but for digits, which it keeps together in groups of up to three
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BEGIN, END, PAD = "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>"
IMAGE_TOKENS = {  # as LFM2-VL's processor looks for them
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
TILES = [  # of images cut into up to four tiles
    f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column <= 4
]
SPECIALS = [BEGIN, "<|end_of_text|>", PAD, "<|start_header_id|>", "<|end_header_id|>", END]
SPECIALS += [*IMAGE_TOKENS.values(), *TILES]

TEMPLATE = """{{ bos_token }}
{%- macro body(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}<image>
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- else -%}{{ raise_exception('Only text and image parts are supported!') }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{ body(message['content']) + '<|eot_id|>' }}{%- endgeneration -%}
    {%- else -%}
        {{ body(message['content']) + '<|eot_id|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif -%}
"""


def tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    bpe = byte_level_bpe(corpus, PATTERN, vocab_size, SPECIALS)
    begin = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))],
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=IMAGE_TOKENS,
    )


def processor(
    corpus: Iterable[str],
    template: str,
    image_tokens: int = 24,
    patch_size: int = 14,
    vocab_size: int = 512,
    splitting: bool = False,
) -> Lfm2VlProcessor:
    """An image has up to `image_tokens` tokens of 2 x 2 patches, in about its own aspect ratio; with
    `splitting` a large one is cut into tiles of 4 x 4 patches, and the whole follows."""
    images = Lfm2VlImageProcessor(
        do_image_splitting=splitting,
        use_thumbnail=splitting,
        do_convert_rgb=True,
        min_image_tokens=min(4, image_tokens // 2),
        max_image_tokens=image_tokens,
        max_tiles=4,
        tile_size=4 * patch_size,
        encoder_patch_size=patch_size,
        downsample_factor=2,
    )
    return Lfm2VlProcessor(
        image_processor=images, tokenizer=tokenizer(corpus, vocab_size), chat_template=template
    )


def config(processor: Lfm2VlProcessor, text: dict, vision: dict) -> Lfm2VlConfig:
    """`text` and `vision` override the toy sizes; a `text` entry `tie_word_embeddings` ties the whole model,
    and `model_type` takes another text model."""
    vocab, images = processor.tokenizer, processor.image_processor
    text_config = texts.text_config(vocab, "llama", text)
    vision_config = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": images.encoder_patch_size,
        "num_patches": 64,
        "vision_use_head": False,
    }
    return Lfm2VlConfig(
        text_config=CONFIG_MAPPING[text_config["model_type"]](**text_config),
        vision_config=CONFIG_MAPPING["siglip2_vision_model"](**(vision_config | vision)),
        image_token_id=processor.image_token_id,
        downsample_factor=images.downsample_factor,
        projector_hidden_size=96,
        tie_word_embeddings=text_config["tie_word_embeddings"],
        eos_token_id=vocab.eos_token_id,
        pad_token_id=vocab.pad_token_id,
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={"image_tokens": 4, "patch_size": 14, "text": DEMO_TEXT | {"head_dim": 32}, "vision": DEMO_TOWER},
    variants={
        "llama, tied": {"text": {"attention_bias": True, "tie_word_embeddings": True}},
        "mistral": {"text": {"model_type": "mistral"}},
        "qwen2": {"text": {"model_type": "qwen2"}},
        "qwen3, biased": {"text": {"model_type": "qwen3", "attention_bias": True}},
    },
)
