"""Ministral 3 and Mistral Small 3, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB.

The Instruct checkpoints of Ministral 3 are FP8; they are trained and exported in bf16. docs/recipes.md holds
the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def ministral3_3b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Ministral3 3B, for two 80 GB GPUs and up."""
    return _ministral3("3b", {"tp": 2}, changes)


def ministral3_8b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Ministral3 8B, for four 80 GB GPUs and up."""
    return _ministral3("8b", {"tp": 4}, changes)


def ministral3_14b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Ministral3 14B, for one node of eight 80 GB GPUs."""
    return _ministral3("14b", {"tp": 4}, changes)


def mistral_small_3_24b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """Mistral Small 3.2 24B, for one node of eight 80 GB GPUs with recompute=full, or two."""
    own = {"name": "mistral_small_3_24b", "hf_path": "mistralai/Mistral-Small-3.2-24B-Instruct-2506"}
    return _ministral3("24b", {"tp": 8, **own}, changes)


def mistral3_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Ministral 3 that learns to read digits, for `make demo FAMILY=mistral3`."""
    return tiny_digits("mistral3", TP2, changes)


def _ministral3(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"ministral3_{size}",
        "hf_path": f"mistralai/Ministral-3-{size.upper()}-Instruct-2512",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
