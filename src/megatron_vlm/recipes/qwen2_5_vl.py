"""Qwen2.5-VL, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def qwen25_vl_3b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2.5-VL 3B, for two 80 GB GPUs and up."""
    return _qwen25_vl("3b", {"tp": 2}, changes)


def qwen25_vl_7b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2.5-VL 7B, for four 80 GB GPUs and up."""
    return _qwen25_vl("7b", {"tp": 4}, changes)


def qwen25_vl_32b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2.5-VL 32B, for two nodes of eight 80 GB GPUs and up."""
    return _qwen25_vl("32b", {"tp": 8, "pp": 2, "recompute": "full"}, changes)


def qwen25_vl_72b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2.5-VL 72B, for four nodes of eight 80 GB GPUs and up."""
    return _qwen25_vl("72b", {"tp": 8, "pp": 4, "recompute": "full"}, changes)


def qwen2_5_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen2.5-VL that learns to read digits, for `make demo FAMILY=qwen2_5_vl`."""
    return tiny_digits("qwen2_5_vl", TP2, changes)


def _qwen25_vl(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"qwen25_vl_{size}",
        "hf_path": f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct",
        "max_pixels": 1280 * 28**2,  # at most 1280 tokens an image
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
