"""An optimizer whose numbers lie in host memory trains to the bit as one whose numbers lie on the device."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import parity
import pytest
import saved_cases
import torch
from adapter_runs import Run

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.hf import open_source
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed
from tiny.gemma4 import DENSE

STEPS, HALF = 4, 2


def run_of(folder: str, dtype: str, offload: bool, name: str) -> RunConfig:
    run = RunConfig(run_dir=f"{folder}/{dtype}_{name}")
    run.model = ModelConfig(hf_path=f"{folder}/source", dtype=dtype)
    run.optimizer.lr, run.optimizer.weight_decay, run.train.steps = 1e-2, 0.1, STEPS
    run.optimizer.offload = offload
    return run


def trained(folder: str, dtype: str) -> dict[str, list]:
    """Losses and the exported files' bytes: of whole runs, and of runs that went on the other way."""
    from megatron_vlm.callbacks.exports import export_step
    from megatron_vlm.training import optimizer

    optimizer.BUCKET = 1024  # most parameters have several
    case = saved_cases.read(f"{folder}/case.pt")
    found = {}
    for name, ways in {"kept": (0, 0), "away": (1, 1), "then away": (0, 1), "then kept": (1, 0)}.items():
        first = Run(run_of(folder, dtype, bool(ways[0]), name))
        losses = first.train(case, HALF)
        first.save(HALF)
        then = Run(run_of(folder, dtype, bool(ways[1]), name))
        losses += then.train(case, STEPS - HALF)
        export_step(then.config, then.source, then.model, STEPS)
        torch.distributed.barrier()
        [weights] = Path(then.config.run_dir, "exports").glob("*/*.safetensors")
        found[name] = [losses, hashlib.sha256(weights.read_bytes()).hexdigest(), held(then.optimizer)]
    return found


def held(optimizer) -> int:
    """The bytes of the fp32 parameters that the device holds for Adam."""
    from megatron_vlm.training.optimizer import torch_adams

    groups = [group for adam in torch_adams(optimizer) for group in adam.param_groups]
    return sum(param.untyped_storage().nbytes() for group in groups for param in group["params"])


def in_ranks(folder: str) -> dict[str, dict[str, list]]:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    return {dtype: trained(folder, dtype) for dtype in ("bf16", "fp32")}


CELLS = [pytest.param("gemma3", 1, {}, marks=pytest.mark.long)]
CELLS += [pytest.param("qwen3_5", 1, {}, marks=pytest.mark.soak)]
CELLS += [pytest.param(*cell, marks=pytest.mark.soak) for cell in (("gemma3", 2, {}), ("gemma4", 1, DENSE))]


@pytest.mark.parametrize(("family", "processes", "text"), CELLS)
def test_an_offloaded_optimizer_trains_resumes_and_exports_the_same_bits(tmp_path, family, processes, text):
    source = open_source(build_tiny_checkpoint(family, tmp_path / "source", text=text))
    parity.save_case(source, ["it", "t"], tmp_path / "case.pt")
    for rank in run_distributed(processes, in_ranks, str(tmp_path)):
        for dtype, found in rank.items():
            losses, weights, memory = found["kept"]
            assert len(set(losses)) == STEPS
            for name, (other_losses, other_weights, _) in found.items():
                assert (other_losses, other_weights) == (losses, weights), (dtype, name)
        assert rank["bf16"]["away"][2] < rank["bf16"]["kept"][2] / 100
    shutil.rmtree(tmp_path)
