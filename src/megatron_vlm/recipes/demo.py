"""Runs small enough for a laptop's processor."""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import RecipeArgs, build

TP2: RecipeArgs = {"tp": 2, "micro_batch_size": 32}  # two processes share every layer
EP2: RecipeArgs = {"ep": 2, "micro_batch_size": 16}  # two processes share the experts and the data


def gemma3_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Gemma3 that learns to read digits on two processor cores; `make demo` prepares what it needs."""
    return _tiny_digits("demo", TP2, changes)


def ministral3_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Ministral3 that learns to read digits, for `make demo FAMILY=ministral3`."""
    return _tiny_digits("demo-ministral3", TP2, changes)


def qwen25_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen2.5-VL that learns to read digits, for `make demo FAMILY=qwen25_vl`."""
    return _tiny_digits("demo-qwen25_vl", TP2, changes)


def qwen3_vl_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen3-VL that learns to read digits, for `make demo FAMILY=qwen3_vl`."""
    return _tiny_digits("demo-qwen3_vl", TP2, changes)


def qwen3_vl_moe_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Qwen3-VL with experts that learns to read digits, for `make demo FAMILY=qwen3_vl_moe`."""
    return _tiny_digits("demo-qwen3_vl_moe", EP2, changes)


def glm_45v_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny GLM-4.5V that learns to read digits, for `make demo FAMILY=glm_45v`."""
    return _tiny_digits("demo-glm_45v", {**EP2, "lr": 1e-3}, changes)  # at 2e-3 it learns more slowly


def _tiny_digits(name: str, own: RecipeArgs, changes: RecipeArgs) -> RunConfig:
    defaults = {
        "name": name,
        "hf_path": "${run_dir}/start",
        "train_data_path": "${run_dir}/dataset",
        "dtype": "fp32",
        "seq_length": 128,
        "num_workers": 1,
        "lr": 2e-3,
        "min_lr": 1e-5,
        "warmup_steps": 20,
        "steps": 500,
        "global_batch_size": 32,
        "eval_every": 100,
    }
    return build({**defaults, **own}, changes)
