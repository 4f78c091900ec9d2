"""Runs that tests rehearse, and tiny models' configs without their weights."""

from __future__ import annotations

from typing import Any

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus


def run_of(parallel: ParallelConfig) -> RunConfig:
    """Two rows of 256 tokens in each of four micro batches, with images."""
    run = RunConfig(parallel=parallel, run_dir="none")
    run.model = ModelConfig(hf_path="none", dtype="fp32", attention="documents", load_weights=False)
    run.data.train_data_path, run.data.seq_length, run.data.max_pixels = "none", 256, 112**2
    run.train.micro_batch_size, run.train.global_batch_size = 2, 8
    return run


def config_of(family: str) -> Any:
    parts = TINY_FAMILIES[family]
    return parts.config(parts.processor(default_corpus(), parts.template), {}, {})
