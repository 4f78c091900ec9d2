"""The tiny Ministral 3 and Mistral Small 3: everything the real ones have, at toy size."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import processors
from transformers import Mistral3Config, PixtralImageProcessor, PixtralProcessor, PreTrainedTokenizerFast

from tiny import texts
from tiny.byte_level import byte_level_bpe
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

# Words, single digits, punctuation and whitespace, as Mistral's Tekken cuts text.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NAMED_SPECIALS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIALS = [  # in Tekken's order, so that each has its published id
    *["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    *["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"],
    *["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"],
]

TEMPLATE = """{{ bos_token }}
{%- macro body(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'image' -%}[IMG]
            {%- elif part['type'] == 'text' -%}{{ part['text'] }}
            {%- else -%}{{ raise_exception('Only text and image parts are supported!') }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' and loop.first -%}
        {{ '[SYSTEM_PROMPT]' + body(message['content']) + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'user' -%}
        {{ '[INST]' + body(message['content']) + '[/INST]' }}
    {%- elif message['role'] == 'assistant' -%}
        {%- generation -%}{{ body(message['content']) + eos_token }}{%- endgeneration -%}
    {%- else -%}
        {{ raise_exception('Only user, assistant and (first) system roles are supported!') }}
    {%- endif -%}
{%- endfor -%}
"""


def tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    bpe = byte_level_bpe(corpus, PATTERN, vocab_size, SPECIALS)
    begin = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        padding_side="left",
        extra_special_tokens=[token for token in SPECIALS if token not in NAMED_SPECIALS.values()],
        **NAMED_SPECIALS,
    )


def processor(
    corpus: Iterable[str], template: str, image_size: int = 224, vocab_size: int = 512
) -> PixtralProcessor:
    """`image_size` is the longest edge; smaller images keep their size, rounded up to whole image tokens."""
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": image_size}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer(corpus, vocab_size),
        patch_size=14,
        spatial_merge_size=2,
        chat_template=template,
    )


def config(processor: PixtralProcessor, text: dict, vision: dict) -> Mistral3Config:
    """`text` and `vision` override the toy sizes; `tie_word_embeddings` of `text` is that of the model."""
    vocab = processor.tokenizer
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
    return Mistral3Config(
        **texts.whole(vocab, "ministral3", text),
        vision_config=vision_config | vision,
        image_token_index=processor.image_token_id,
        spatial_merge_size=processor.spatial_merge_size,
        vision_feature_layer=-1,
        projector_hidden_act="gelu",
        multimodal_projector_bias=False,
    )


FAMILY = TinyFamily(
    TEMPLATE,
    processor,
    config,
    demo={"image_size": 56, "text": DEMO_TEXT, "vision": DEMO_TOWER},
    published={"image_size": 1540},
    variants={
        "mistral": {"text": {"model_type": "mistral"}},
        "mistral4": {"text": {"model_type": "mistral4"}},
        "mistral4, plain queries": {
            "text": {
                "model_type": "mistral4",
                "q_lora_rank": None,
                "v_head_dim": 32,
                "attention_bias": True,
                "rope_interleave": False,
            }
        },
    },
)
