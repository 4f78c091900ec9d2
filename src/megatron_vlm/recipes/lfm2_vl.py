"""SigLIP2's tower and a text model, composed, in bf16 with fp32 gradients and Adam, sized for 80 GB GPUs.

No such checkpoint is published: `hf_path` is the folder of one that was composed. recipes/ has run files for
the two stages of training, first the projector alone, then everything. docs/recipes.md holds the memory
arithmetic behind the layouts.
"""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, build, tiny_digits


def siglip2_llama31_8b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """SigLIP2 So400m and Llama 3.1 8B, for four 80 GB GPUs and up."""
    return _composed("siglip2_llama31_8b", {"tp": 4}, changes)


def siglip2_qwen3_4b(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """SigLIP2 So400m and Qwen3 4B, for two 80 GB GPUs and up."""
    return _composed("siglip2_qwen3_4b", {"tp": 2}, changes)


def lfm2_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny SigLIP2 and Llama that learn to read digits, for `make demo FAMILY=lfm2_vl`."""
    return tiny_digits("lfm2_vl", TP2, changes)


def _composed(name: str, layout: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": name,
        "hf_path": f"./{name}",
        "warmup_steps": 50,
        "global_batch_size": 64,
        "save_every": 500,
    }
    return build({**defaults, **layout}, changes)
