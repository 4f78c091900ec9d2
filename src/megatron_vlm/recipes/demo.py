"""Runs small enough for a laptop's processor."""

from __future__ import annotations

from typing import Unpack

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes.base import RecipeArgs, build


def gemma3_tiny_digits(**changes: Unpack[RecipeArgs]) -> RunConfig:
    """A tiny Gemma3 that learns to read digits on two processor cores; `make demo` prepares what it needs."""
    return build(
        {
            "name": "demo",
            "hf_path": "runs/demo/start",
            "train_data_path": "runs/demo/dataset",
            "dtype": "fp32",
            "tp": 2,
            "seq_length": 128,
            "num_workers": 1,
            "lr": 5e-3,
            "min_lr": 1e-5,
            "warmup_steps": 20,
            "steps": 600,
            "micro_batch_size": 32,
            "global_batch_size": 32,
            "eval_every": 100,
        },
        changes,
    )
