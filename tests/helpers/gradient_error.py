"""How far gradients that are added up and reduced in bf16 are from those in fp32, beside what bf16 costs
anyway: the distance of either from the gradients of the model in fp32."""

from __future__ import annotations

from typing import Any

import parity
import saved_cases
import torch

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig

COUNTS = (1, 4, 16)  # micro batches of a rank


def of_ranks(path: str, file: str) -> list[dict[str, float]]:
    """For every number of micro batches, relative to the norm of the second: "fp32", the distance of
    gradients reduced in fp32 from those of a model in fp32, "bf16", that of gradients reduced in bf16, and
    "between", that of these two."""
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    source = open_source(path)
    rows = parity.my_micro_batches(saved_cases.read(file), ParallelConfig())
    mine = [parity.on_device(batch) for batch, _ in rows]
    kinds = {"exact": ("fp32", True), "fp32": ("bf16", True), "bf16": ("bf16", False)}
    models = {name: model_of(path, source, *kind) for name, kind in kinds.items()}
    found = []
    for count in COUNTS:
        grads = {name: gradients(model, mine[:count]) for name, model in models.items()}
        size = grads["exact"].norm()
        found.append(
            {
                "micro_batches": count,
                "fp32": ((grads["fp32"] - grads["exact"]).norm() / size).item(),
                "bf16": ((grads["bf16"] - grads["exact"]).norm() / size).item(),
                "between": ((grads["bf16"] - grads["fp32"]).norm() / size).item(),
            }
        )
    return found


def model_of(path: str, source: Any, dtype: str, reduce_in_fp32: bool) -> list:
    from megatron_vlm.models.opened import open_model
    from megatron_vlm.training.step import data_parallel

    run = RunConfig(run_dir="none", model=ModelConfig(hf_path=path, dtype=dtype))
    run.optimizer.reduce_in_fp32 = reduce_in_fp32
    return data_parallel(open_model(run, source), run)


def gradients(model: list, micro_batches: list[dict]) -> torch.Tensor:
    """All gradients of one step, in fp32 and whole."""
    from megatron_vlm.training.step import empty_gradients

    for chunk in model:
        empty_gradients(chunk)
    parity.backward(model, micro_batches)
    parity.gather_sharded_grads(model)
    weights = [weight for chunk in model for weight in chunk.parameters() if weight.requires_grad]
    return torch.cat([weight.main_grad.float().flatten() for weight in weights])
