"""GLM-4.5V, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import EP2, RecipeArgs, build, tiny_digits


def glm_45v(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """GLM-4.5V, 106B with 128 experts, for eight nodes of eight 80 GB GPUs and up."""
    return build(
        {
            "name": "glm_45v",
            "hf_path": "zai-org/GLM-4.5V",
            "pp": 8,
            "ep": 8,
            "recompute": "full",
            "max_pixels": 1280 * 28**2,  # at most 1280 tokens an image
            "warmup_steps": 50,
            "global_batch_size": 64,
            "save_every": 500,
        },
        changes,
    )


def glm4v_moe_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny GLM-4.5V that learns to read digits, for `make demo FAMILY=glm4v_moe`."""
    return tiny_digits("glm4v_moe", {**EP2, "lr": 1e-3}, changes)  # at 2e-3 it learns more slowly
