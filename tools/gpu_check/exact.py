"""Tiny models on this device against Transformers: in fp32 within the tests' limits, in bf16 as a ratio."""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import parity
import torch
from torch import Tensor

from gpu_check.rows import Row
from gpu_check.sizes import About, Sizes
from megatron_vlm.batch import Batch
from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config, load_model, load_processor
from megatron_vlm.parallel import setup
from megatron_vlm.training.evaluate import logits_of
from megatron_vlm.weight_files import hub_name
from tiny.checkpoints import build_tiny_checkpoint

ROWS = ["t", "it", "ititit"]  # without an image, with one and with three
LIMITS = {
    "max_abs_logits": parity.MAX_ABS_LOGITS,
    "abs_loss": parity.MAX_ABS_LOSS,
    "max_rel_grad": parity.MAX_REL_GRAD,
}
MOST_OF_THEIRS = 1.5  # our error over theirs


def parity_rows(sizes: Sizes, about: About) -> Iterator[Row]:
    return of_each(about, "parity", differences)


def ratios(sizes: Sizes, about: About) -> Iterator[Row]:
    return of_each(about, "bf16", ratios_of)


def of_each(about: About, part: str, rows: Callable[[str, Path], Iterator[Row]]) -> Iterator[Row]:
    """The rows of each family's tiny checkpoint. A family that fails is a row, and the next one begins."""
    for family in about.families:
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield from rows(family, build_tiny_checkpoint(family, folder))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            traceback.print_exc()
            yield Row(part, f"{family} failed", f"{type(error).__name__}: {error}", wrong=True)


def differences(family: str, path: Path) -> Iterator[Row]:
    padded = parity.case_for(str(path), ROWS)
    for name, case in {"padded": padded, "packed": parity.packed(padded)}.items():
        found = parity.compare(ParallelConfig(), str(path), case)
        for key, limit in LIMITS.items():
            yield Row("parity", f"{family}, {name}, {key}", found[key], limit)


def ratios_of(family: str, path: Path) -> Iterator[Row]:
    """Errors against Transformers in fp32: ours in bf16 over theirs in bf16, all on this device.

    Where bf16 chooses other experts, numbers of single tokens differ grossly: there is no limit.
    """
    description = describe(load_config(path))
    hf, batch, _ = parity.encode(load_processor(path), description, ROWS)
    exact = of_transformers(path, hf, torch.float32)
    theirs = errors(of_transformers(path, hf, torch.bfloat16), exact)
    mine = errors(of_ours(path, batch), exact)
    limit = None if description.has_experts else MOST_OF_THEIRS
    for what in exact:
        yield Row("bf16", f"{family}, {what}, our error of theirs", mine[what] / theirs[what], limit)
        yield Row("bf16", f"{family}, {what}, our error", mine[what])


Numbers = dict[str, dict[str, Tensor]]  # "logits" of all real tokens, "gradients" by HF key


def of_transformers(path: Path, hf: dict[str, Tensor], dtype: torch.dtype) -> Numbers:
    device = setup.device()
    model = parity.as_meant(load_model(path, dtype)).to(device)
    if describe(load_config(path)).has_experts:
        model.set_experts_implementation("eager")
    output = model(**{name: x.to(device) for name, x in hf.items()}, use_cache=False)
    output.loss.backward()
    renames = describe(load_config(path)).renames
    grads = {hub_name(name, renames): param.grad for name, param in model.named_parameters()}
    real = hf["attention_mask"].bool()
    return numbers(output.logits.detach().cpu()[real], grads)


def of_ours(path: Path, batch: Batch) -> Numbers:
    setup.reset_layout(ParallelConfig(), seed=1)
    model = parity.Model(ParallelConfig(), str(path), dtype="bf16")
    batch = parity.on_device(batch)
    parity.backward(model.ddp, [batch])
    grads = {key: grad.clone() for key, grad in parity.gradients_of(model.chunks, model.rules)}
    real = batch["attention_mask"].bool()
    logits = logits_of(model.ddp, [batch])[0].cpu().view(*real.shape, -1)[real]
    return numbers(logits, grads)


def numbers(logits: Tensor, grads: dict[str, Tensor | None]) -> Numbers:
    """Gradients that one model alone has are left out of both by `errors`."""
    held = {key: grad.float().cpu() for key, grad in grads.items() if grad is not None}
    return {"logits": {"logits": logits.float()}, "gradients": held}


def errors(found: Numbers, exact: Numbers) -> dict[str, float]:
    """The root of the sum of squares of all differences, of that of the exact numbers."""
    result = {}
    for what, expected in exact.items():
        pairs = [(found[what][key], x) for key, x in expected.items() if key in found[what]]
        wrong = sum((a - b).square().sum().item() for a, b in pairs)
        result[what] = math.sqrt(wrong / sum(b.square().sum().item() for _, b in pairs))
    return result
