"""Qwen3-VL, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import RecipeArgs, build


def qwen3_vl_2b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 2B, for one 80 GB GPU and up."""
    return _qwen3_vl("2b", {}, changes)


def qwen3_vl_4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 4B, for two 80 GB GPUs and up."""
    return _qwen3_vl("4b", {"tp": 2}, changes)


def qwen3_vl_8b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 8B, for four 80 GB GPUs and up."""
    return _qwen3_vl("8b", {"tp": 4}, changes)


def qwen3_vl_32b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 32B, for two nodes of eight 80 GB GPUs and up."""
    return _qwen3_vl("32b", {"tp": 8, "pp": 2, "recompute": "full"}, changes)


def qwen3_vl_30b_a3b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 30B with 128 experts, for two nodes of eight 80 GB GPUs and up."""
    return _qwen3_vl("30b-a3b", {"pp": 2, "ep": 8, "recompute": "full"}, changes)


def qwen3_vl_235b_a22b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 235B with 128 experts, for sixteen nodes of eight 80 GB GPUs and up."""
    return _qwen3_vl("235b-a22b", {"pp": 16, "ep": 8, "recompute": "full"}, changes)


def _qwen3_vl(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"qwen3_vl_{size}".replace("-", "_"),
        "hf_path": f"Qwen/Qwen3-VL-{size.upper()}-Instruct",
        "max_pixels": 1280 * 32**2,  # at most 1280 tokens an image
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
