"""LLaVA-OneVision, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def llava_onevision_05b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """LLaVA-OneVision 0.5B, for one 80 GB GPU and up."""
    return _onevision("0.5b", {}, changes)


def llava_onevision_7b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """LLaVA-OneVision 7B, for four 80 GB GPUs and up."""
    return _onevision("7b", {"tp": 4}, changes)


def llava_onevision_72b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """LLaVA-OneVision 72B, for four nodes of eight 80 GB GPUs and up."""
    return _onevision("72b", {"tp": 8, "pp": 4, "recompute": "full"}, changes)


def llava_onevision_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny LLaVA-OneVision that learns to read digits, for `make demo FAMILY=llava_onevision`."""
    return tiny_digits("llava_onevision", TP2, changes)


def _onevision(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"llava_onevision_{size.replace('.', '')}",
        "hf_path": f"llava-hf/llava-onevision-qwen2-{size}-ov-hf",
        "seq_length": 8192,  # an image in tiles has up to 7,371 tokens
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
