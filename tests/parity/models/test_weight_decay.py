"""Weight decay changes the parameters that Transformers' Trainer decays, and no other.

In the checkpoint every parameter that the Trainer decays is 1, and every other one is 2. A step on gradients
of zero, with a learning rate times weight decay of a half, must make 0.5 of each 1 and leave each 2. So no
names are compared, and a parameter that holds several HF tensors shows if these are not alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapter_parity
import parity
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from megatron_vlm.config import OptimizerConfig, ParallelConfig
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

DECAYED, OTHER = 1.0, 2.0
AFTER = {DECAYED: 0.5, OTHER: 2.0}
OFTEN = ("gemma3", "qwen2_5_vl")  # whose towers have norms that are LayerNorms, and others
CASES = {
    "often": [(family, "") for family in OFTEN],
    "families": [(family, "") for family in TINY_FAMILIES if family not in OFTEN],
    "variants": [(family, name) for family, parts in TINY_FAMILIES.items() for name in parts.variants],
}
MARKS = {"often": [], "families": pytest.mark.long, "variants": pytest.mark.soak}
LAYOUTS = [
    ParallelConfig(tp=2),
    ParallelConfig(pp=2),
    ParallelConfig(ep=2),
    ParallelConfig(distributed_optimizer=False),
]
ADAPTERS = {
    "gemma3": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "qwen2_5_vl": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["visual.merger", "language_model.norm"],
    },
    "qwen3_vl_moe": adapter_parity.OF_EXPERTS["adapter of experts"],
}


@torch.no_grad()
def mark(model: nn.Module) -> None:
    """Fill each parameter with DECAYED or OTHER, whichever it is to Transformers' Trainer."""
    from transformers import Trainer  # six seconds of imports

    decayed = {*Trainer.get_decay_parameter_names(None, model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.fill_(DECAYED if name in decayed else OTHER)


def marked_checkpoint(family: str, folder: Path, **sizes: Any) -> str:
    path = build_tiny_checkpoint(family, folder, **sizes)
    model = AutoModelForImageTextToText.from_pretrained(path)
    mark(model)
    model.save_pretrained(path)
    return str(path)


def steps_of_decay(runs: list[tuple[ParallelConfig, str, str | None]]) -> list[dict[str, tuple]]:
    """For each layout, checkpoint and adapter, the different numbers of each trained parameter of this rank,
    before and after a step."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    return [step_of_decay(*run) for run in runs]


def step_of_decay(layout: ParallelConfig, path: str, adapter: str | None) -> dict[str, tuple]:
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import build_optimizer

    setup.reset_layout(layout, seed=1)
    model = parity.Model(layout, path, adapter)
    model.run.optimizer = OptimizerConfig(lr=0.5, weight_decay=1.0, clip_grad=0.0)
    optimizer, _ = build_optimizer(model.ddp, model.run)
    trained = {
        name: parameter
        for chunk in model.ddp
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
    before = {name: parameter.unique().tolist() for name, parameter in trained.items()}
    for parameter in trained.values():
        parameter.main_grad.zero_()
    optimizer.step()
    return {name: (before[name], parameter.unique().tolist()) for name, parameter in trained.items()}


def assert_decays_as_marked(step: dict[str, tuple], case: object) -> None:
    for name, (before, after) in step.items():
        assert len(before) == 1, f"{case}: {name}: Transformers decays only some of its HF tensors"
        assert after == [AFTER[number] for number in before], (case, name)
    assert any(before == [DECAYED] for before, _ in step.values()), case


@pytest.mark.parametrize("cases", [pytest.param(CASES[name], id=name, marks=MARKS[name]) for name in CASES])
def test_every_parameter_decays_as_in_transformers(cases, tmp_path):
    runs = []
    for number, (family, variant) in enumerate(cases):
        sizes = TINY_FAMILIES[family].variants[variant] if variant else {}
        path = marked_checkpoint(family, tmp_path / str(number), **sizes)
        runs.append((ParallelConfig(), path, None))
    [steps] = run_distributed(1, steps_of_decay, runs)
    for case, step in zip(cases, steps, strict=True):
        assert_decays_as_marked(step, case)


@pytest.mark.long
def test_layouts_decay_alike(tmp_path):
    path = marked_checkpoint("qwen3_vl_moe", tmp_path)
    for steps in run_distributed(2, steps_of_decay, [(layout, path, None) for layout in LAYOUTS]):
        for layout, step in zip(LAYOUTS, steps, strict=True):
            assert_decays_as_marked(step, layout)


@pytest.mark.long
def test_adapters_and_modules_to_save_decay_as_with_peft(tmp_path):
    runs = []
    for family, settings in ADAPTERS.items():
        path = build_tiny_checkpoint(family, tmp_path / family)
        model = adapter_parity.peft_model(path, settings)
        mark(model)
        model.save_pretrained(tmp_path / "adapters" / family)
        runs.append((ParallelConfig(), str(path), str(tmp_path / "adapters" / family)))
    [steps] = run_distributed(1, steps_of_decay, runs)
    for family, step in zip(ADAPTERS, steps, strict=True):
        assert_decays_as_marked(step, family)
