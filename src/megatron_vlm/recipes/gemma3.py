"""Gemma3, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def gemma3_vl_4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Gemma3 4B, for four 80 GB GPUs and up, or two with recompute=full."""
    return _gemma3("4b", {"tp": 2}, changes)


def gemma3_vl_12b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Gemma3 12B, for one node of eight 80 GB GPUs."""
    return _gemma3("12b", {"tp": 4}, changes)


def gemma3_vl_27b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Gemma3 27B, for one node of eight 80 GB GPUs and up."""
    return _gemma3("27b", {"tp": 8, "recompute": "full"}, changes)


def gemma3_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Gemma 3 that learns to read digits, for `make demo FAMILY=gemma3`."""
    return tiny_digits("gemma3", TP2, changes)


def _gemma3(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"gemma3_vl_{size}",
        "hf_path": f"google/gemma-3-{size}-it",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
