"""Recipes: functions with keyword arguments that return the full configuration of a run.

    from megatron_vlm.recipes import load_recipe
    config = load_recipe("gemma3_vl_4b")(train_data_path="/data/shards", tp=4)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megatron_vlm.config import ConfigError, RunConfig, suggestion

RECIPES = {
    "gemma3_vl_4b": "megatron_vlm.recipes.gemma3",
    "gemma3_vl_12b": "megatron_vlm.recipes.gemma3",
    "gemma3_vl_27b": "megatron_vlm.recipes.gemma3",
    "gemma3_tiny_digits": "megatron_vlm.recipes.demo",
}


def load_recipe(name: str) -> Callable[..., RunConfig]:
    """The recipe function of that name. Raises ConfigError on an unknown one."""
    if name not in RECIPES:
        raise ConfigError(f"{name}: no such recipe{suggestion(name, RECIPES)}")
    return getattr(importlib.import_module(RECIPES[name]), name)


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (load_recipe(name).__doc__ or "").strip().splitlines()[0]
