"""A model that trains adapters or all of itself, in the processes that a test starts: runs, and what a first
step gives."""

from __future__ import annotations

import hashlib
from typing import Any

import parity
import torch

from megatron_vlm.config import AdapterConfig, ModelConfig, ParallelConfig, RunConfig


class Run:
    """A model with adapters and its optimizer, continued from the run folder if that has a checkpoint."""

    def __init__(self, run: RunConfig):
        from megatron_vlm.models.hf import open_source
        from megatron_vlm.parallel import setup
        from megatron_vlm.run_folder import with_own_start
        from megatron_vlm.training import checkpoint
        from megatron_vlm.training.loop import starting_model
        from megatron_vlm.training.optimizer import build_optimizer

        setup.reset_layout(run.parallel, seed=1)
        run = with_own_start(run)
        self.config, self.source = run, open_source(run.model.hf_path)
        self.model = starting_model(run, self.source)
        self.optimizer, self.scheduler = build_optimizer(self.model, run)
        self.state = checkpoint.load_latest(run.run_dir, self.model, self.optimizer, self.scheduler)
        self.chunks = [chunk.module for chunk in self.model]

    def train(self, case: dict, steps: int) -> list[float]:
        from megatron_vlm.training.step import train_step

        mine = self.micro_batches(case)
        return [train_step(self.model, self.optimizer, self.scheduler, mine)[0] for _ in range(steps)]

    def micro_batches(self, case: dict) -> list[dict]:
        return [parity.on_device(batch) for batch, _ in parity.my_micro_batches(case, self.config.parallel)]

    def save(self, step: int) -> None:
        from megatron_vlm.training import checkpoint

        checkpoint.save(self.config.run_dir, step, self.model, self.optimizer, self.scheduler)

    def logits(self, case: dict) -> list[torch.Tensor]:
        """Of each row, in a layout without data parallelism; empty where they are not computed."""
        from megatron_vlm.training.evaluate import logits_of

        for chunk in self.model:
            chunk.eval()
        return logits_of(self.model, self.micro_batches(case)) or []

    def digests(self) -> tuple[str, str]:
        """Of the bytes of this rank's base weights, and of its adapters and their moments."""
        from megatron_vlm.training.optimizer import torch_adams

        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        base = [p for n, p in named if not n.startswith("adapters.")]
        adapters = [p for n, p in named if n.startswith("adapters.")]
        for adam in torch_adams(self.optimizer):
            for group in adam.param_groups:
                adapters += [value for p in group["params"] for _, value in sorted(adam.state[p].items())]
        return digest(base), digest(adapters)


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def outcome(
    path: str, case: dict, layout: ParallelConfig, adapter: AdapterConfig | None = None, **model: Any
) -> dict[str, torch.Tensor]:
    """Logits, by micro batch, and gradients, by name; `model` sets fields of ModelConfig."""
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.evaluate import logits_of
    from megatron_vlm.training.loop import starting_model

    run = RunConfig(run_dir="none", parallel=layout, adapter=adapter or AdapterConfig())
    run.model = ModelConfig(hf_path=path, **{"dtype": "fp32", **model})
    setup.reset_layout(layout, seed=1)
    ddp = starting_model(run, open_source(path))
    for chunk in ddp:
        chunk.zero_grad_buffer()
    micro_batches = [parity.on_device(row) for row in case["rows"]]
    parity.backward(ddp, micro_batches)
    trained = {name: p.main_grad.clone() for name, p in ddp[0].named_parameters() if p.requires_grad}
    logits = logits_of(ddp, micro_batches)
    return trained | {f"logits {number}": each for number, each in enumerate(logits)}


def largest_difference(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of two outcomes, in parts of the largest number of each tensor."""
    assert ours.keys() == expected.keys()
    assert all(each.any() for name, each in expected.items() if name.startswith("logits"))
    return max(
        ((ours[key] - each).abs().max() / each.abs().max().clamp_min(1e-12)).item()
        for key, each in expected.items()
    )
