"""Learning rates and weight decay of parts: Adam's steps on gradients of ones tell what each parameter has.

With such gradients Adam moves every parameter by exactly its learning rate, if it has all its earlier steps.
"""

from __future__ import annotations

import re

import parity
import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_vlm.config import (
    AdapterConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from megatron_vlm.overrides import apply_overrides, from_yaml, to_yaml
from megatron_vlm.validate import validate
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

LR, MIN_LR, STEPS = 1e-3, 1e-4, 10
FIRST = {"tower": 2e-4, "projector": 5e-3, r"layers\.1\.": 3e-2}
SECOND = {"language_model": 7e-3, r"embed_tokens|lm_head": 4e-4}
LAYOUTS = {
    "gemma3": {"DP2": ParallelConfig(), "PP2": ParallelConfig(pp=2), "TP2": ParallelConfig(tp=2)},
    "qwen3_vl_moe": {"EP2": ParallelConfig(ep=2), "PP2": ParallelConfig(pp=2)},
}
EXACT = 2e-6  # of numbers up to 1 in fp32, moved by up to 0.03


def run_of(layout: ParallelConfig, rates: dict[str, float], **settings) -> RunConfig:
    adam = OptimizerConfig(lr=LR, min_lr=MIN_LR, clip_grad=0, lr_by_part=rates, **settings)
    run = RunConfig(parallel=layout, model=ModelConfig(dtype="fp32"), optimizer=adam)
    run.train.steps = STEPS
    return run


def started(run: RunConfig, path: str):
    """(chunks, optimizer, scheduler, HF names of each parameter) in the layout that is set up."""
    from megatron_vlm.models.weights.by_part import _trained_parameters, parameters_by_part
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import build_optimizer
    from megatron_vlm.training.step import data_parallel

    setup.reset_layout(run.parallel, seed=1)
    description, chunks = parity.load_chunks(path, run)
    ddp, rules = data_parallel(chunks, run), description.weight_map.rules
    own = parameters_by_part(ddp, run.optimizer.by_part, description.groups, rules)
    return ddp, *build_optimizer(ddp, run, by_part=own), list(_trained_parameters(ddp, rules))


def step(ddp, optimizer, scheduler, named) -> dict[str, tuple[str, int, float, float]]:
    """HF name -> (name, axes, least and greatest move) in a step on gradients of ones."""
    before = [param.detach().clone() for _, param, _ in named]
    for chunk in ddp:
        for param in chunk.parameters():
            if param.requires_grad:
                param.main_grad.fill_(1.0)
    optimizer.step()
    scheduler.step(increment=1)
    moves = [old - param.detach() for old, (_, param, _) in zip(before, named, strict=True)]
    return {
        hf_name: (name, param.dim(), move.min().item(), move.max().item())
        for move, (name, param, hf_names) in zip(moves, named, strict=True)
        for hf_name in hf_names
    }


def steps_of_ranks(path: str, layouts: dict[str, ParallelConfig], root: str) -> dict:
    """By layout: moves of a step with FIRST, and of a step that goes on with SECOND, in that layout and in
    plain data parallelism; and what is logged."""
    from megatron_vlm.models.weights.by_part import trained_share
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint
    from megatron_vlm.training.optimizer import learning_rates

    setup.init_distributed(ParallelConfig(), seed=1)
    found = {}
    for name, layout in layouts.items():
        first = started(run_of(layout, FIRST), path)
        logged = learning_rates(first[2])
        share = trained_share(first[0])
        moves = [step(*first)]
        checkpoint.save(f"{root}/{name}", 1, *first[:3])
        for other in (layout, ParallelConfig()):
            second = started(run_of(other, SECOND), path)
            checkpoint.load_latest(f"{root}/{name}", *second[:3])
            rates = learning_rates(second[2])
            moves.append(step(*second))
        found[name] = {"moves": moves, "logged": logged, "rates": rates, "share": share}
    return found


@pytest.fixture(scope="module", params=["gemma3", pytest.param("qwen3_vl_moe", marks=pytest.mark.long)])
def of_ranks(request, tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("by_part")
    path = build_tiny_checkpoint(request.param, root / "start")
    return run_distributed(2, steps_of_ranks, str(path), LAYOUTS[request.param], str(root))


def expected(hf_name: str, name: str, rates: dict[str, float]) -> float:
    """By the words of the documentation."""
    part = (
        "language_model"
        if name.startswith("language_model.")
        else "projector"
        if re.search(r"multi_modal_projector|merger", name)
        else "tower"
    )
    patterns = [
        rate
        for key, rate in rates.items()
        if key not in ("tower", "projector", "language_model") and re.search(key, hf_name)
    ]
    return patterns[0] if patterns else rates.get(part, LR)


def falls(number: int) -> float:
    """The share of the learning rate after so many steps: a cosine from LR to MIN_LR, as a share of LR."""
    return (
        MIN_LR + (LR - MIN_LR) * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * number / STEPS)).item())
    ) / LR


def test_the_parameters_of_all_ranks_are_counted_once(of_ranks, tmp_path):
    family = "qwen3_vl_moe" if "EP2" in of_ranks[0] else "gemma3"
    path = build_tiny_checkpoint(family, tmp_path)
    count = AutoModelForImageTextToText.from_pretrained(path).num_parameters()
    for rank in of_ranks:
        assert {layout["share"] for layout in rank.values()} == {(count, count, 1.0)}


@pytest.mark.long
def test_every_parameter_moves_by_the_rate_of_its_part_or_pattern(of_ranks):
    seen = set()
    for rank in of_ranks:
        for layout in rank.values():
            for hf_name, (name, _, least, most) in layout["moves"][0].items():
                rate = expected(hf_name, name, FIRST)
                assert (least, most) == pytest.approx((rate, rate), abs=EXACT), (hf_name, name)
                seen.add(rate)
            assert layout["logged"] == {"lr": LR} | {f"lr_{key}": rate for key, rate in FIRST.items()}
    assert seen == {LR, *FIRST.values()}


@pytest.mark.long
def test_a_resumed_run_has_the_rates_of_now_and_all_of_adams_steps(of_ranks):
    """Also in another layout. Rates fall by the cosine, all in proportion."""
    seen = set()
    for rank in of_ranks:
        for layout in rank.values():
            for moves in layout["moves"][1:]:
                for hf_name, (name, _, least, most) in moves.items():
                    rate = expected(hf_name, name, SECOND)
                    assert (least, most) == pytest.approx([rate * falls(1)] * 2, abs=EXACT), (hf_name, name)
                    seen.add(rate)
            keys = {"lr": LR} | {f"lr_{key}": rate for key, rate in SECOND.items()}
            assert layout["rates"] == pytest.approx({key: rate * falls(1) for key, rate in keys.items()})
    assert seen == {LR, *SECOND.values()}


def moves_of_adapters(path: str) -> dict[str, tuple[float, float]]:
    """By name of an adapter's parameter: its least and greatest move; and by name what is logged."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import learning_rates

    setup.init_distributed(ParallelConfig(), seed=1)
    run = run_of(ParallelConfig(tp=2), {"adapters": 3e-3, r"lora_B": 5e-3})
    run.adapter = AdapterConfig(r=4, target_modules="all-linear")
    parts = started(run, path)
    rates = {key: (rate, rate) for key, rate in learning_rates(parts[2]).items()}
    return rates | {name: tuple(ends) for name, (_, _, *ends) in step(*parts).items()}


@pytest.mark.long
def test_adapters_are_a_part_and_have_names_for_patterns(tiny_gemma3):
    for found in run_distributed(2, moves_of_adapters, str(tiny_gemma3)):
        assert [found.pop(key)[0] for key in ("lr", "lr_adapters", "lr_lora_B")] == [LR, 3e-3, 5e-3]
        assert len(found) > 20
        for name, ends in found.items():
            rate = 5e-3 if "lora_B" in name else 3e-3
            assert ends == pytest.approx((rate, rate), abs=EXACT), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer.lr_by_part.tower": -1},
            "optimizer.lr_by_part: tower: -1: Input should be greater than 0",
        ),
        ({"optimizer.weight_decay_by_part": "{'a(': 0.1}"}, "a\\( is no part of the model and no pattern"),
        ({"optimizer.lr_by_part.adapters": 1}, "adapters: the run has none, as adapter.r is 0; drop it"),
        ({"optimizer.lr_by_part.tower": 1, "optimizer.lr": 0}, "optimizer.lr is 0; set it, and freeze"),
    ],
)
def test_settings_of_parts_are_checked_before_anything_is_built(settings, message):
    base = {"run_dir": "run", "model.hf_path": "m", "data.train_data_path": "d"}
    with pytest.raises(ConfigError, match=message):
        validate(apply_overrides(RunConfig(), base | settings))


def test_settings_of_parts_are_read_from_the_command_line_and_written_down():
    config = apply_overrides(
        RunConfig(), ["optimizer.lr_by_part.tower=1e-6", r"optimizer.lr_by_part.a\.b=2e-6"]
    )
    assert config.optimizer.lr_by_part == {"tower": 1e-6, r"a\.b": 2e-6}
    assert from_yaml(to_yaml(config)).optimizer == config.optimizer
    with pytest.raises(
        ConfigError, match="optimizer.lr_by_part: tower: 'fast': Input should be a valid number"
    ):
        apply_overrides(RunConfig(), ["optimizer.lr_by_part.tower=fast"])
