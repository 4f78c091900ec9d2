"""Tiny Hugging Face checkpoints with real processors, built without a network, for tests and the demo."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from megatron_vlm.supported import SUPPORTED, too_old
from tiny.corpus import default_corpus
from tiny.family import TinyFamily

TINY_FAMILIES: dict[str, TinyFamily] = {
    name: import_module(f"tiny.{name}").FAMILY for name in SUPPORTED if not too_old(name)
}


def build_tiny_checkpoint(
    family: str,
    path: str | Path,
    *,
    corpus: Iterable[str] | None = None,
    text: dict | None = None,
    vision: dict | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    generation_tags: bool = True,
    **processor_sizes: int,
) -> Path:
    """Save a complete checkpoint of random weights (config, safetensors, tokenizer, processor, template).

    `text` and `vision` override entries of the two sub-configs, `processor_sizes` those of the processor
    (`image_size`, `image_tokens`, `vocab_size`). Digits are always pieces of their own, whatever the corpus.
    Equal arguments give equal files. Raises KeyError on an unknown family.
    """
    parts = TINY_FAMILIES[family]
    template = parts.template if generation_tags else without_generation_tags(parts.template)
    processor = parts.processor(corpus or default_corpus(), template, **processor_sizes)
    model = random_model(parts.config(processor, text or {}, vision or {}), seed, dtype)
    ends = getattr(model.config, "eos_token_id", None)  # Qwen2-VL's has none in Transformers 5.17
    model.generation_config.eos_token_id = ends or model.config.get_text_config().eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return Path(path)


def without_generation_tags(template: str) -> str:
    """The template as most checkpoints publish it: with the same rendering, but without marked replies."""
    template = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", template)


def random_model(config: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config with weights that all matter.

    Transformers initializes some weights to 0 or 1 (norms, biases, Gemma3's projector, GLM's selection bias).
    They are changed too, so that every weight affects the output and an error in any of them shows. Then some
    are multiplied by their family's `factors`.
    """
    model = perturbed(
        lambda: AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=False), seed
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for end, factor in TINY_FAMILIES[config.model_type].factors.items():
                if name.endswith(end):
                    weight.mul_(factor)
    return model


def perturbed(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """What `build` makes with that seed, every weight of which differs from 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for weight in model.state_dict(keep_vars=True).values():
                if (weight == weight.flatten()[0]).all():
                    weight.nan_to_num_(posinf=2.0, neginf=-2.0)  # limits without effect get one
                    weight.add_(torch.randn_like(weight) * 0.05)
    return model
