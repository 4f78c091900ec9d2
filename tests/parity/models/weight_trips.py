"""Weights that are imported and exported again in every layout, and how they are compared."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig

LAYOUTS = {"TP1": ParallelConfig(), "TP2": ParallelConfig(tp=2), "PP2": ParallelConfig(pp=2)}
LAYOUTS["PP2·VPP2"] = ParallelConfig(pp=2, vpp=2)
EXPERT_LAYOUTS = {"EP2": ParallelConfig(ep=2), "EP2·TP2": ParallelConfig(ep=2, tp=2)}


def round_trips(jobs: list[tuple[str, str, str]]) -> None:
    """(layout, source, output) one after the other: import, export, and what a checkpoint would have."""
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.parallel import setup

    if not torch.distributed.is_initialized():
        setup.init_distributed(ParallelConfig(), seed=1)
    for name, source, output in jobs:
        layout = (LAYOUTS | EXPERT_LAYOUTS)[name]
        setup.reset_layout(layout, seed=1)
        description = open_source(source).description
        run = RunConfig(parallel=layout, model=ModelConfig(dtype="bf16" if "bf16" in source else "fp32"))
        chunks = build_model(run, description, setup.device())
        weight_map = description.weight_map
        import_hf(chunks, source, weight_map)
        export_hf(chunks, output, source, weight_map, shard_bytes=100_000)  # several files
        check_saved_once(chunks)


def check_saved_once(chunks: list) -> None:
    """A checkpoint has each part of each tensor from one rank. Collective."""
    from megatron.core.dist_checkpointing import validation
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.state_dict_utils import extract_sharded_base

    from megatron_vlm.training.tensor_files import sharded_state

    state = sharded_state(chunks, None, loading=False)
    apply_factories(state)
    sharded, _ = extract_sharded_base(state)
    validation.validate_sharding_integrity(validation.determine_global_metadata(sharded)[1])


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


def check_equal(exported: Path, source: Path) -> None:
    check_tensors_equal(all_tensors(exported), all_tensors(source))


def check_tensors_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) > 50
    for key, tensor in theirs.items():
        assert mine[key].dtype == tensor.dtype and torch.equal(mine[key], tensor), key
