"""InternVL 3.5, full fine-tuning in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

The checkpoints are those in the format of Transformers, whose names end in `-HF`. docs/recipes.md holds the
memory arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def internvl35_1b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """InternVL3.5 1B, for one 80 GB GPU and up."""
    return _internvl35("1B", {}, changes)


def internvl35_4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """InternVL3.5 4B, for two 80 GB GPUs and up."""
    return _internvl35("4B", {"tp": 2}, changes)


def internvl35_8b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """InternVL3.5 8B, for four 80 GB GPUs and up."""
    return _internvl35("8B", {"tp": 4}, changes)


def internvl35_14b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """InternVL3.5 14B, for one node of eight 80 GB GPUs."""
    return _internvl35("14B", {"tp": 4}, changes)


def internvl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny InternVL that learns to read digits, for `make demo FAMILY=internvl`."""
    return tiny_digits("internvl", TP2, changes)


def _internvl35(size: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": f"internvl35_{size.lower()}",
        "hf_path": f"OpenGVLab/InternVL3_5-{size}-HF",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
