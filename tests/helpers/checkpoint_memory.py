"""The memory of each of several processes while they save and load a checkpoint, beside what they hold."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_vlm.config import ParallelConfig, RunConfig
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus

FAMILY = "qwen3_vl"
# 20 million parameters: what is measured is much more than what programs need otherwise
TEXT = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
TEXT |= {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 16_384}


def of_rank(folder: str, gathered: bool) -> dict[str, int]:
    """Bytes by which the resident memory of this rank rises at most: to "save" and to "load", beside its
    "shard", an equal part of the files. The model is in bf16 under data parallelism.

    `gathered`: as Megatron's fully reshardable format does it.
    """
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint

    setup.init_distributed(ParallelConfig(), seed=1)
    if gathered:
        as_megatron_does()
    saved, found = parts(RunConfig(run_dir=folder)), {}
    for step in (1, 2):  # what the first loads once does not count
        found["save"] = growth(checkpoint.save, folder, step, *saved)
        found["load"] = growth(checkpoint.load_latest, folder, *saved)
    files = (Path(folder) / "checkpoints/step_00000002").iterdir()
    return found | {"shard": sum(file.stat().st_size for file in files) // int(os.environ["WORLD_SIZE"])}


def parts(run: RunConfig) -> tuple[list, Any, Any]:
    """The model, its optimizer and its schedule, after Adam has allocated what it keeps."""
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import build_optimizer
    from megatron_vlm.training.step import data_parallel

    run.model.load_weights = False
    family = TINY_FAMILIES[FAMILY]
    hf_config = family.config(family.processor(default_corpus(), family.template), TEXT, {})
    model = data_parallel(build_model(run, describe(hf_config), setup.device()), run)
    return model, *build_optimizer(model, run)


def as_megatron_does() -> None:
    from megatron_vlm.training import tensor_files
    from megatron_vlm.training.optimizer import ShardedOptimizer

    for name in ("sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"):
        setattr(ShardedOptimizer, name, getattr(DistributedOptimizer, name))
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states
    ShardedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: set_state(
        self,
        parameter,
        {"step": None, **tensors},  # which Megatron looks for, and does not gather
    )
    tensor_files.FullyParallelLoadStrategyWrapper = lambda strategy, group: strategy


def growth(do: Callable, *arguments: Any) -> int:
    """Bytes by which resident memory is higher at most while `do` runs (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it is now
    before = _resident("VmRSS")
    do(*arguments)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
