"""Qwen3-VL, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def qwen3_vl_2b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 2B, for one 80 GB GPU and up."""
    return sized("2b", {}, changes)


def qwen3_vl_4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 4B, for two 80 GB GPUs and up."""
    return sized("4b", {"tp": 2}, changes)


def qwen3_vl_8b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 8B, for four 80 GB GPUs and up."""
    return sized("8b", {"tp": 4}, changes)


def qwen3_vl_32b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 32B, for two nodes of eight 80 GB GPUs and up."""
    return sized("32b", {"tp": 8, "pp": 2, "recompute": "full"}, changes)


def qwen3_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen3-VL that learns to read digits, for `make demo FAMILY=qwen3_vl`."""
    return tiny_digits("qwen3_vl", TP2, changes)


def sized(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    """What the recipes of all sizes have in common, with experts or without."""
    defaults = {
        "name": f"qwen3_vl_{size}".replace("-", "_"),
        "hf_path": f"Qwen/Qwen3-VL-{size.upper()}-Instruct",
        "max_pixels": 1280 * 32**2,  # at most 1280 tokens an image
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
