"""GLM-4.1V and GLM-4.6V-Flash, full fine-tuning in bf16 with fp32 gradients and Adam, for 80 GB GPUs.

docs/recipes.md holds the memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def glm_41v_9b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """GLM-4.1V-Thinking 9B, for one node of eight 80 GB GPUs."""
    return _glm4v("glm_41v_9b", "zai-org/GLM-4.1V-9B-Thinking", changes)


def glm_46v_flash(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """GLM-4.6V-Flash, 9B, for one node of eight 80 GB GPUs."""
    return _glm4v("glm_46v_flash", "zai-org/GLM-4.6V-Flash", changes)


def glm4v_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny GLM-4.1V that learns to read digits, for `make demo FAMILY=glm4v`."""
    return tiny_digits("glm4v", TP2, changes)


def _glm4v(name: str, hf_path: str, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": name,
        "hf_path": hf_path,
        "tp": 2,  # its attention has two key/value heads
        "pp": 2,
        "max_pixels": 1280 * 28**2,  # at most 1280 tokens an image
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build(defaults, changes)
