"""An engine gets adapters merged into the weights, or by themselves, bit for bit as files have them."""

from __future__ import annotations

import policy_in_ranks
import policy_with_adapters
import pytest
import torch

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder, given = tmp_path_factory.mktemp("adapters"), {}
    for family in ("gemma3", "qwen3_vl_moe"):
        path = build_tiny_checkpoint(family, folder / family)
        torch.save((policy_in_ranks.samples_of(family, path), None), folder / f"{family}.pt")
        given[family] = str(path), str(folder / f"{family}.pt")
    return run_distributed(2, policy_with_adapters.measure, given, str(folder), timeout=600)


@pytest.mark.parametrize("case", policy_with_adapters.CASES)
def test_streamed_weights_are_those_of_a_merged_export(found, case):
    for rank in found:
        assert rank[case]["moved"] and rank[case]["merged"]
        assert rank[case]["untouched"]  # the policy goes on with its adapters


@pytest.mark.parametrize("case", policy_with_adapters.CASES)
def test_adapters_alone_are_those_of_pefts_file(found, case):
    for rank in found:
        assert rank[case]["adapters"] and any("lora_A" in name for name in rank[case]["names"])
        assert all(name.startswith("base_model.model.") for name in rank[case]["names"])
