"""The way of a small model through a run: saved, resumed, exported, asked, and moved to the host and back."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import torch
from torch.nn import Module

from gpu_check.rows import Row
from gpu_check.sizes import NAME, ON_CUDA, About, Sizes
from megatron_vlm.batch import Batch, Prompt
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.generation.generate import generate
from megatron_vlm.models.hf import load_model, open_source
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.weights.exporting import export_hf
from megatron_vlm.parallel import setup
from megatron_vlm.rl.losses import Loss
from megatron_vlm.rl.policy import Policy
from megatron_vlm.training import checkpoint
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import data_parallel, train_step
from tiny.checkpoints import build_tiny_checkpoint

FAMILIES = ("gemma3", "qwen3_vl")  # of one kind of image each
ROWS = ["it", "ititit"]
# CUDA adds some gradients in an order that differs between two runs
MOST_OF_LOSS = 1e-3 if ON_CUDA else 0.0
NEW_TOKENS = 8


class Run:
    """A model of a checkpoint with its optimizer."""

    def __init__(self, path: Path, dtype: str = NAME):
        setup.reset_layout(ParallelConfig(), seed=1)
        self.config = RunConfig(model=ModelConfig(hf_path=str(path), dtype=dtype), run_dir=str(path))
        self.config.optimizer.lr = 1e-3
        self.source = open_source(path)
        self.chunks = open_model(self.config, self.source)
        self.model: list[Module] = data_parallel(self.chunks, self.config)
        self.optimizer, self.scheduler = build_optimizer(self.model, self.config)

    def losses(self, batch: Batch, steps: int) -> list[float]:
        parts = self.model, self.optimizer, self.scheduler
        return [train_step(*parts, [batch])[0] for _ in range(steps)]

    def restore(self, folder: Path) -> Any:
        return checkpoint.load_latest(folder, self.model, self.optimizer, self.scheduler)


def tiny_ones(about: About) -> Iterator[tuple[str, Path]]:
    for family in FAMILIES:
        if family in about.families:
            with tempfile.TemporaryDirectory() as folder:
                yield family, build_tiny_checkpoint(family, Path(folder, "checkpoint"))


def batch_of(path: Path) -> Batch:
    source = open_source(path)
    return parity.on_device(parity.encode(source.processor, source.description, ROWS)[1])


def save_rows(sizes: Sizes, about: About) -> Iterator[Row]:
    for family, path in tiny_ones(about):
        batch, folder = batch_of(path), path.parent / "run"
        run = Run(path)
        run.losses(batch, 2)
        checkpoint.save(folder, 2, run.model, run.optimizer, run.scheduler, loader_state={})
        expected = run.losses(batch, 2)
        resumed = Run(path)
        yield Row("save", f"{family}, step of the checkpoint", float(resumed.restore(folder).step))
        found = resumed.losses(batch, 2)
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        yield Row(
            "save", f"{family}, {NAME}, loss of a resumed run against one that went on", worst, MOST_OF_LOSS
        )
        yield from exported(family, path, resumed)


def exported(family: str, path: Path, run: Run) -> Iterator[Row]:
    """The export is imported again, and loaded by Transformers."""
    output = path.parent / "exported"
    export_hf(run.chunks, output, path, run.source.weight_map)
    again = Run(output)
    pairs = zip(run.chunks[0].named_parameters(), again.chunks[0].named_parameters(), strict=True)
    differ = [name for (name, ours), (_, back) in pairs if not torch.equal(ours, back)]
    yield Row(
        "save", f"{family}, tensors of the export that differ {' '.join(differ[:3])}", float(len(differ)), 0
    )
    count = sum(weight.numel() for weight in load_model(output).parameters())
    yield Row("save", f"{family}, parameters that Transformers loads from it", float(count))


# --- answers ----------------------------------------------------------------------------------------------


def generate_rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """In fp32, where the likeliest token is the same one."""
    for family, path in tiny_ones(about):
        run = Run(path, "fp32")
        source, device = run.source, setup.device()
        hf, batch, _ = parity.encode(source.processor, source.description, ["it"])
        length = int(hf["attention_mask"].sum())
        visual = batch["visual_inputs"]
        prompt = Prompt(
            input_ids=batch["input_ids"][0, :length],
            position_ids=batch["position_ids"][..., 0, :length],
            visual_inputs=visual and visual.to(device),
        )
        began = time.monotonic()
        answer = generate(run.model, [prompt], NEW_TOKENS)[0][0].tokens
        took = time.monotonic() - began
        model = load_model(path, torch.float32).to(device)
        asked = {name: x.to(device) for name, x in hf.items() if name not in ("labels", "position_ids")}
        theirs = model.generate(
            **asked, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None
        )[0, length:].tolist()
        differ = sum(a != b for a, b in zip(answer, theirs, strict=True))
        yield Row(
            "generate", f"{family}, of {NEW_TOKENS} greedy tokens differ from Transformers'", float(differ), 0
        )
        yield Row("generate", f"{family}, seconds of them", took)


# --- a policy ---------------------------------------------------------------------------------------------


def offload_rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """Weights, optimizer state and gradients go to the host between two steps and come back to the bit."""
    for family, path in tiny_ones(about):
        setup.reset_layout(ParallelConfig(), seed=1)
        policy = Policy.from_hf(RunConfig(model=ModelConfig(hf_path=str(path), dtype=NAME)))
        samples = samples_of(policy)
        loss = lambda log_probs, *_: Loss(-log_probs.sum(), {})  # noqa: E731
        policy.forward_backward(samples, loss, 10)
        policy.step()
        before = policy.logprobs(samples).log_probs
        held = allocated()
        seconds_away = timed(lambda policy=policy: policy.to("cpu"))
        left = allocated()
        seconds_back = timed(lambda policy=policy: policy.to("cuda"))
        after = policy.logprobs(samples).log_probs
        same = all(map(torch.equal, before, after))
        yield Row(
            "offload", f"{family}, log-probabilities differ after the way there and back", float(not same), 0
        )
        yield Row("offload", f"{family}, seconds there and back", seconds_away + seconds_back)
        yield Row("offload", f"{family}, MiB on the device before", held / 2**20)
        yield Row("offload", f"{family}, MiB on the device meanwhile", left / 2**20)


def samples_of(policy: Policy) -> list[dict[str, Any]]:
    source = policy.source
    hf, _, rows = parity.encode(source.processor, source.description, ["it"])
    visual = rows[0]["visual_inputs"].as_model_kwargs()
    return [{"input_ids": hf["input_ids"][0]} | visual]


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_CUDA else 0


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()  # on a CPU `parallel.cpu` answers
    began = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - began
