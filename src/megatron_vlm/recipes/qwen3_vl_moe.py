"""Qwen3-VL with experts, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import EP2, RecipeArgs, tiny_digits
from megatron_vlm.recipes.qwen3_vl import sized


def qwen3_vl_30b_a3b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 30B with 128 experts, for two nodes of eight 80 GB GPUs and up."""
    return sized("30b-a3b", {"pp": 2, "ep": 8, "recompute": "full"}, changes)


def qwen3_vl_235b_a22b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Qwen3-VL 235B with 128 experts, for sixteen nodes of eight 80 GB GPUs and up."""
    return sized("235b-a22b", {"pp": 16, "ep": 8, "recompute": "full"}, changes)


def qwen3_vl_moe_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen3-VL with experts that learns to read digits, for `make demo FAMILY=qwen3_vl_moe`."""
    return tiny_digits("qwen3_vl_moe", EP2, changes)
