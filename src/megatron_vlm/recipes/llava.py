"""LLaVA 1.5, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def llava15_7b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """LLaVA 1.5 7B, for four 80 GB GPUs and up."""
    return _llava15("7b", {"tp": 2}, changes)


def llava15_13b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """LLaVA 1.5 13B, for four 80 GB GPUs and up."""
    return _llava15("13b", {"tp": 4}, changes)


def llava_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny LLaVA that learns to read digits, for `make demo FAMILY=llava`."""
    return tiny_digits("llava", TP2, changes)


def _llava15(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"llava15_{size}",
        "hf_path": f"llava-hf/llava-1.5-{size}-hf",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
