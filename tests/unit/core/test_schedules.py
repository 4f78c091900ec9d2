"""Learning rates after the warm-up are those of Transformers' schedulers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from megatron_vlm.config import RunConfig
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.training.optimizer import _scheduler, _warmup

LR, STEPS = 2e-3, 50
DECAY = "optimizer.decay_ratio=0.2"


def rates(*settings: str) -> list[float]:
    """Of each step."""
    config = apply_overrides(RunConfig(), [f"optimizer.lr={LR}", f"train.steps={STEPS}", *settings])
    groups = [{"lr_mult": 1.0}]
    schedule = _scheduler(SimpleNamespace(param_groups=groups), config, _warmup(config, STEPS), STEPS)
    found = []
    for _ in range(STEPS):
        found.append(groups[0]["lr"])
        schedule.step(1)
    return found


def of_transformers(name: str, warmup: int, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = get_scheduler(name, optimizer, warmup, STEPS, options or None)
    found = []
    for _ in range(STEPS):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ("cosine", ("cosine", {})),
        ("linear", ("linear", {})),
        ("constant", ("constant_with_warmup", {})),
        ("wsd", ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear"})),
    ],
)
def test_rates_are_transformers(settings, theirs):
    name, options = theirs
    ours = rates(f"optimizer.lr_scheduler_type={settings}", "optimizer.warmup_steps=5", DECAY)
    assert ours[5:] == pytest.approx(of_transformers(name, 5, **options)[5:], abs=1e-12)
    assert ours[:6] == pytest.approx([LR * (step + 1) / 6 for step in range(6)])


def test_a_share_of_the_run_takes_the_place_of_warm_up_steps():
    by_share = rates("optimizer.warmup_ratio=0.09")
    assert by_share == rates("optimizer.warmup_steps=5") != rates()
    config = apply_overrides(RunConfig(), ["optimizer.warmup_ratio=0.1"])
    config = apply_overrides(config, ["optimizer.warmup_steps=3"])
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_ratio) == (3, None)
