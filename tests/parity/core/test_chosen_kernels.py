"""Ranks that disagree about which kernels run, or which is fast, take the same one."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from megatron_vlm.config import ConfigError, ModelConfig, ParallelConfig
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.parallel import setup
from tiny.distributed import run_distributed


def _fastest_of_two_ranks(cases: dict) -> dict:
    """What this rank takes, or what its error says, and what it is warned of, for each case."""
    setup.init_distributed(ParallelConfig(), 1)
    results = {}
    for case, (of_rank, seconds) in cases.items():
        kernel_checks._seconds = lambda name, *_, seconds=seconds: seconds[dist.get_rank()][name]
        kernel_checks.chosen.clear()
        problems, sizes = of_rank[dist.get_rank()], (4, 2, 16)
        with warnings.catch_warnings(record=True) as caught:
            try:
                result = kernel_checks._fastest(
                    "attention", ModelConfig(), problems, sizes, torch.bfloat16, ["a view"], dist.group.WORLD
                )
            except ConfigError as error:
                result = str(error)
        results[case] = result, [str(warning.message) for warning in caught]
    return results


def test_all_ranks_take_a_kernel_that_runs_on_all_and_is_fastest_on_all_together():
    both = {"flash": None, "cudnn": None}
    broken = both | {"cudnn": "cudnn does not run here"}
    seconds = [{"flash": 1.0, "cudnn": 1.5, "flash4": 0.1}, {"flash": 99.0, "cudnn": 1.0}]
    cases = {
        "speeds differ": ([both, both], seconds),
        "one breaks a kernel": ([both, broken], seconds),
        "one lacks a kernel": ([both | {"flash4": None}, both], seconds),
        "none in common": ([both | {"flash": "flash differs"}, broken], seconds),
    }
    first, second = run_distributed(2, _fastest_of_two_ranks, cases)
    assert first == second
    note = "attention, heads of 16: rank 1: {}; no rank takes it"
    assert first["speeds differ"] == ("cudnn", [])
    assert first["one breaks a kernel"] == ("flash", [note.format("cudnn does not run here")])
    assert first["one lacks a kernel"] == ("cudnn", [note.format("flash4 is not installed")])
    text, noted = first["none in common"]
    said = "attention, heads of 16: rank 0: flash differs; rank 1: cudnn does not run here. model.fallbacks="
    assert text.startswith(said) and len(noted) == 2
