"""The demo of GLM-4.6V under Transformers' own name; recipes of the published sizes are in `glm4v`."""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import TP2, RecipeArgs, tiny_digits


def glm46v_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny GLM-4.6V that learns to read digits, for `make demo FAMILY=glm46v`."""
    return tiny_digits("glm46v", TP2, changes)
