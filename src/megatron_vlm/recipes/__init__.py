"""Recipes: functions with keyword arguments that return the full configuration of a run.

from megatron_vlm.recipes import load_recipe
config = load_recipe("gemma3_vl_4b")(train_data_path="/data/shards", tp=4)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.messages import suggestion
from megatron_vlm.overrides import apply_overrides, flatten, load_yaml, split_override
from megatron_vlm.recipes.base import SETTING_OF_ARGUMENT, as_arguments, as_settings

RECIPES = {
    "gemma3_vl_4b": "megatron_vlm.recipes.gemma3",
    "gemma3_vl_12b": "megatron_vlm.recipes.gemma3",
    "gemma3_vl_27b": "megatron_vlm.recipes.gemma3",
    "glm_45v": "megatron_vlm.recipes.glm4v_moe",
    "qwen25_vl_3b": "megatron_vlm.recipes.qwen2_5_vl",
    "qwen25_vl_7b": "megatron_vlm.recipes.qwen2_5_vl",
    "qwen25_vl_32b": "megatron_vlm.recipes.qwen2_5_vl",
    "qwen25_vl_72b": "megatron_vlm.recipes.qwen2_5_vl",
    "qwen3_vl_2b": "megatron_vlm.recipes.qwen3_vl",
    "qwen3_vl_4b": "megatron_vlm.recipes.qwen3_vl",
    "qwen3_vl_8b": "megatron_vlm.recipes.qwen3_vl",
    "qwen3_vl_32b": "megatron_vlm.recipes.qwen3_vl",
    "ministral3_3b": "megatron_vlm.recipes.mistral3",
    "ministral3_8b": "megatron_vlm.recipes.mistral3",
    "ministral3_14b": "megatron_vlm.recipes.mistral3",
    "qwen3_vl_30b_a3b": "megatron_vlm.recipes.qwen3_vl",
    "qwen3_vl_235b_a22b": "megatron_vlm.recipes.qwen3_vl",
    "gemma3_tiny_digits": "megatron_vlm.recipes.demo",
    "ministral3_tiny_digits": "megatron_vlm.recipes.demo",
    "qwen25_vl_tiny_digits": "megatron_vlm.recipes.demo",
    "qwen3_vl_tiny_digits": "megatron_vlm.recipes.demo",
    "qwen3_vl_moe_tiny_digits": "megatron_vlm.recipes.demo",
    "glm_45v_tiny_digits": "megatron_vlm.recipes.demo",
}
ARGUMENTS = tuple(SETTING_OF_ARGUMENT)
RUN_FILE_KEYS = ("recipe", "args", "overrides")


def load_recipe(name: str) -> Callable[..., RunConfig]:
    """The recipe function of that name. Raises ConfigError on an unknown one."""
    if name not in RECIPES:
        raise ConfigError(f"{name}: no such recipe{suggestion(name, RECIPES)}")
    return getattr(importlib.import_module(RECIPES[name]), name)


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (load_recipe(name).__doc__ or "").strip().splitlines()[0]


def compose(
    recipe: str | None = None,
    file: Path | None = None,
    settings: Iterable[str] = (),
    arguments: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration that a command line asks for; each of these goes over the ones before it.

    1. the recipe, or the file's: `file` is YAML with `recipe`, `args` and `overrides`, or a run's own
       `config.yaml`;
    2. the file's `args`, then its `overrides`;
    3. `arguments` and `settings`: `key=value` is a keyword argument of the recipe, `key.path=value` an
       override on what it returns.

    A recipe sees the arguments it knows however they were written, `steps=10` or `train.steps=10`.
    Raises ConfigError on an unknown recipe, argument or setting, and on a value of the wrong type.
    """
    written = _read_run_file(file) if file else {}
    bare, dotted = _split_settings(settings)
    given = {**as_settings({**(arguments or {}), **bare}), **dotted}
    if "recipe" in written or recipe:
        overrides = flatten(written.get("overrides", {}))
        known = {**written.get("args", {}), **as_arguments(overrides), **as_arguments(given)}
        config = load_recipe(recipe or written["recipe"])(**known)
        config = apply_overrides(config, overrides)
    elif written:
        config = apply_overrides(RunConfig(), written)
    else:
        raise ConfigError(f"give --recipe NAME or --config FILE; the recipes are {', '.join(RECIPES)}.")
    return apply_overrides(config, given)


def _split_settings(settings: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    pairs = dict(split_override(text) for text in settings)
    dotted = {key: value for key, value in pairs.items() if "." in key}
    return {key: value for key, value in pairs.items() if key not in dotted}, dotted


def _read_run_file(file: Path) -> dict[str, Any]:
    try:
        written = load_yaml(file.read_text(encoding="utf-8"), place=str(file))
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror}); give a file of recipes/.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: no text, but a binary file; give a YAML file of recipes/.") from error
    if "recipe" not in written:
        return written
    if not isinstance(written["recipe"], str):
        raise ConfigError(
            f"{file}: recipe: {written['recipe']!r} is no name; `megatron-vlm recipes` lists them."
        )
    for key in written:
        if key not in RUN_FILE_KEYS:
            raise ConfigError(f"{file}: {key}: no such entry{suggestion(key, RUN_FILE_KEYS)}")
    for key in ("args", "overrides"):
        if not isinstance(written.setdefault(key, {}) or {}, dict):
            kind = type(written[key]).__name__
            raise ConfigError(f"{file}: {key}: expected settings as `key: value` lines, found {kind}.")
    written["args"] = {str(name): value for name, value in (written["args"] or {}).items()}
    return {key: value or {} for key, value in written.items()}
