"""What is recomputed changes no bit of a gradient, and is not kept."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import saved_cases
import torch
from adapter_runs import outcome

from megatron_vlm.config import AdapterConfig, ParallelConfig
from megatron_vlm.models.hf import open_source
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

ADAPTER = AdapterConfig(r=4, target_modules="all-linear")
# norms after sub-layers, adapters, experts, layers with inputs of their own, recurrent ones, latent attention
FAMILIES = {
    "gemma3": None,
    "qwen3_vl": ADAPTER,
    "qwen3_vl_moe": None,
    "gemma4": None,
    "qwen3_5": None,
    "kimi_k25": None,
}
AGAIN: dict[str, dict[str, Any]] = {
    "norms and gates": {"recompute": "selective"},
    "the tower": {"recompute": "full", "recompute_layers": 0},
    "one layer": {"recompute": "full", "recompute_layers": 1},
    "all layers": {"recompute": "full"},
}


def differing(layout: ParallelConfig, paths: dict[str, str]) -> list[tuple]:
    """By family and what is recomputed: whose gradients differ from those of a step that keeps all."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(layout, seed=1)
    found = []
    for family, path in paths.items():
        case = saved_cases.read(f"{path}/case.pt")
        expected = outcome(path, case, layout, FAMILIES[family])
        for name, settings in AGAIN.items():
            found_again = outcome(path, case, layout, FAMILIES[family], **settings)
            assert found_again.keys() == expected.keys()
            differ = [key for key, each in found_again.items() if not torch.equal(each, expected[key])]
            found.append((family, name, differ))
    return found


OVERLAPPED = ParallelConfig(tp=2, tp_comm_overlap=True)


@pytest.mark.parametrize(
    ("layout", "families"),
    [
        (ParallelConfig(), ["qwen3_vl_moe"]),
        pytest.param(OVERLAPPED, list(FAMILIES), marks=pytest.mark.long),
    ],
)
def test_what_is_recomputed_changes_no_bit(layout, families, tmp_path):
    paths = {}
    for family in families:
        paths[family] = str(build_tiny_checkpoint(family, tmp_path / family))
        parity.save_case(open_source(paths[family]), ["it", "t"], f"{paths[family]}/case.pt")
    found = run_distributed(layout.tp, differing, layout, paths)[0]
    assert len(found) == len(families) * len(AGAIN)
    assert [row for row in found if row[-1]] == []
