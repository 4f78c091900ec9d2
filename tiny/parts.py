"""Tiny vision towers and language models as checkpoints of their own, to compose a model of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    CLIPImageProcessor,
    GenerationConfig,
    PixtralImageProcessor,
    PreTrainedTokenizerFast,
    Siglip2ImageProcessor,
    SiglipImageProcessor,
)

from tiny import qwen
from tiny.byte_level import byte_level_bpe
from tiny.checkpoints import perturbed
from tiny.corpus import default_corpus

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"]
LLAMA3 += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA3 += [f"<|reserved_special_token_{number}|>" for number in range(1, 9)]
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def llama3_tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Like Llama 3's: reserved tokens, no pad token of its own, and a text begins with <|begin_of_text|>."""
    bpe = byte_level_bpe(corpus, qwen.PIECES, vocab_size, LLAMA3)
    begin = LLAMA3[0]
    single = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, bpe.token_to_id(begin))]
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), single])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=begin, eos_token="<|end_of_text|>")


def plain_tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """One without any token for images, chats or padding."""
    bpe = byte_level_bpe(corpus, qwen.PIECES, vocab_size, ["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"llama": llama3_tokenizer, "qwen2": qwen.tokenizer, "qwen3": qwen.tokenizer}


def build_language_model(
    model_type: str,
    path: str | Path,
    *,
    tied: bool = False,
    tokenizer: Any = None,
    corpus: Iterable[str] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Save a llama, mistral, qwen2 or qwen3 of random weights with its tokenizer; `changes` its config."""
    words = tokenizer or TOKENIZERS.get(model_type, plain_tokenizer)(corpus or default_corpus())
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
    }
    config = CONFIG_MAPPING[model_type](**(sizes | changes))
    model = perturbed(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype), seed)
    model.generation_config = GenerationConfig(
        eos_token_id=words.eos_token_id, temperature=0.6, do_sample=True
    )
    model.save_pretrained(path)
    words.save_pretrained(path)
    return Path(path)


def build_tower(
    model_type: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    image_size: int = 56,
    patch_size: int = 14,
    **changes: Any,
) -> Path:
    """Save a tower of random weights and its image processor: `siglip2`, `siglip` and `clip` with their text
    half, or a vision model alone; `changes` are the vision config's."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": patch_size,
    }
    kind = model_type.removesuffix("_vision_model")
    sizes |= {"num_patches": 16} if kind == "siglip2" else {"image_size": image_size}
    sizes |= changes
    whole = {"siglip2": "siglip2", "siglip": "siglip", "clip": "clip"}
    if model_type in whole:
        text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = CONFIG_MAPPING[model_type](
            vision_config=sizes,
            text_config=text
            | {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "projection_size": 48},
        )
    else:
        config = CONFIG_MAPPING[model_type](**sizes)
    model = perturbed(lambda: AutoModel.from_config(config, dtype=dtype), seed)
    model.save_pretrained(path)
    square = {"height": image_size, "width": image_size}
    images = {
        "siglip2": lambda: Siglip2ImageProcessor(patch_size=patch_size, max_num_patches=64, **HALF),
        "siglip": lambda: SiglipImageProcessor(size=square, **HALF),
        "clip": lambda: CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=square),
        "pixtral": lambda: PixtralImageProcessor(
            size={"longest_edge": image_size}, patch_size={"height": patch_size, "width": patch_size}
        ),
    }
    images[kind]().save_pretrained(path)
    return Path(path)
