"""An engine gets adapters merged into the weights, or by themselves, bit for bit as files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import policy_in_ranks
import pytest
import saved_cases
import torch
from safetensors.torch import load_file

from megatron_vlm.config import AdapterConfig, ParallelConfig
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- what runs in the ranks


CASES: dict[str, tuple[str, ParallelConfig, AdapterConfig]] = {  # name -> family, layout, adapter
    "PP2, modules trained whole": (
        *("gemma3", ParallelConfig(pp=2)),
        AdapterConfig(r=4, target_modules="all-linear", modules_to_save=["multi_modal_projector"]),
    ),
    "TP2+SP, DoRA": ("gemma3", ParallelConfig(tp=2), AdapterConfig(r=4, lora_alpha=6, use_dora=True)),
    "EP2, experts": (
        *("qwen3_vl_moe", ParallelConfig(ep=2)),
        AdapterConfig(
            r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    ),
}


def measure(given: dict[str, tuple[str, str]], folder: str) -> dict[str, Any]:
    """By case, after one step: whether what is streamed equals what is exported and saved."""
    return {name: _measure(name, *given[CASES[name][0]], Path(folder)) for name in CASES}


def _measure(name: str, path: str, held: str, folder: Path) -> dict[str, Any]:
    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.models.adapters.model import merge
    from megatron_vlm.models.weights.exporting import export_hf

    samples, _ = saved_cases.read(held)
    _, layout, adapter = CASES[name]
    policy = policy_in_ranks.policy_of(path, layout, 300, adapter=adapter)
    policy.forward_backward(samples, policy_in_ranks.loss, 5, entropy=True, fields=["advantage"])
    policy.step()
    before = policy.logprobs(samples).log_probs
    merged = {key: tensor.clone() for key, tensor in policy.hf_weights()}
    adapters = {key: tensor.clone() for key, tensor in policy.adapter_weights()}
    after = policy.logprobs(samples).log_probs
    chunks = [chunk.module for chunk in policy.chunks]
    save_adapters(chunks, folder / f"{name} adapter", adapter, path)
    for chunk in chunks:
        merge(chunk)
    export_hf(chunks, folder / name, policy.source.folder, policy.source.weight_map)
    return {
        "untouched": all(map(torch.equal, before, after)),
        "moved": not _equal(merged, _read(Path(path))),
        "merged": _equal(merged, _read(folder / name)),
        "adapters": _equal(adapters, _read(folder / f"{name} adapter")),
        "names": list(adapters),
    }


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """By names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


# ---- the tests


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder, given = tmp_path_factory.mktemp("adapters"), {}
    for family in ("gemma3", "qwen3_vl_moe"):
        path = build_tiny_checkpoint(family, folder / family)
        torch.save((policy_in_ranks.samples_of(family, path), None), folder / f"{family}.pt")
        given[family] = str(path), str(folder / f"{family}.pt")
    return run_distributed(2, measure, given, str(folder), timeout=600)


@pytest.mark.parametrize("case", CASES)
def test_streamed_weights_are_those_of_a_merged_export(found, case):
    for rank in found:
        assert rank[case]["moved"] and rank[case]["merged"]
        assert rank[case]["untouched"]  # the policy goes on with its adapters


@pytest.mark.parametrize("case", CASES)
def test_adapters_alone_are_those_of_pefts_file(found, case):
    for rank in found:
        assert rank[case]["adapters"] and any("lora_A" in name for name in rank[case]["names"])
        assert all(name.startswith("base_model.model.") for name in rank[case]["names"])
