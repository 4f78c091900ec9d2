"""Gemma 4, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import EP2, RecipeArgs, build, tiny_digits


def gemma4_31b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Gemma 4 31B, dense, for two nodes of eight 80 GB GPUs and up."""
    return _gemma4("31b", {"tp": 4, "pp": 2, "recompute": "full"}, changes)


def gemma4_26b_a4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Gemma 4 26B with 128 experts, for two nodes of eight 80 GB GPUs and up."""
    return _gemma4("26b-a4b", {"pp": 2, "ep": 8, "recompute": "full"}, changes)


def gemma4_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Gemma 4 with experts that learns to read digits, for `make demo FAMILY=gemma4`."""
    # its processor makes at least 64 tokens of a digit
    return tiny_digits("gemma4", {**EP2, "seq_length": 256}, changes)


def _gemma4(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"gemma4_{size.replace('-', '_')}",
        "hf_path": f"google/gemma-4-{size.upper()}-it",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
