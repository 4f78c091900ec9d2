"""Qwen2-VL, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def qwen2_vl_2b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2-VL 2B, for one 80 GB GPU and up."""
    return _qwen2_vl("2b", {}, changes)


def qwen2_vl_7b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2-VL 7B, for four 80 GB GPUs and up."""
    return _qwen2_vl("7b", {"tp": 4}, changes)


def qwen2_vl_72b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen2-VL 72B, for four nodes of eight 80 GB GPUs and up."""
    return _qwen2_vl("72b", {"tp": 8, "pp": 4, "recompute": "full"}, changes)


def qwen2_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen2-VL that learns to read digits, for `make demo FAMILY=qwen2_vl`."""
    return tiny_digits("qwen2_vl", TP2, changes)


def _qwen2_vl(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"qwen2_vl_{size}",
        "hf_path": f"Qwen/Qwen2-VL-{size.upper()}-Instruct",
        "max_pixels": 1280 * 28**2,  # at most 1280 tokens an image
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
