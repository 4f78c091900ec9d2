"""SigLIP2 and a text model, composed."""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, tiny_digits


def lfm2_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny SigLIP2 and Llama that learn to read digits, for `make demo FAMILY=lfm2_vl`."""
    return tiny_digits("lfm2_vl", TP2, changes)
