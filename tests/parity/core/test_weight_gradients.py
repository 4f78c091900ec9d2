"""Gradients that linears add to Megatron's buffers themselves are those that are made first, then added."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import saved_cases
import torch
from adapter_runs import largest_difference, outcome

from megatron_vlm.config import AdapterConfig, ConfigError, ModelConfig, ParallelConfig
from megatron_vlm.models.hf import open_source
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.models.layers.kernel_checks import check, weight_gradient_disagreement
from megatron_vlm.parallel import linears
from megatron_vlm.parallel.linears import wgrad_gemm_accum_fp32
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "recomputed": {"recompute": "full"},
    "norms and gates recomputed": {"recompute": "selective"},
    "bf16": {"dtype": "bf16"},
    "frozen": {"freeze": ["language_model"]},
    "adapters": {"adapter": AdapterConfig(r=4, target_modules="all-linear")},
}
LARGEST = {"fp32": 1e-6, "bf16": 8e-3}  # difference, of a parameter's largest; measured: 0 and 3.5e-3
LINEARS, MICRO_BATCHES = 4, 2  # of a layer: q k v together, output, gate and up together, down


def every_case(path: str, file: str, layout: ParallelConfig) -> dict[str, dict[str, float]]:
    """By case: calls of the product, and the largest difference."""
    from megatron_vlm.parallel import linears, setup

    setup.init_distributed(layout, seed=1)
    case, found, calls = saved_cases.read(file), {}, []
    product = linears.wgrad_gemm_accum_fp32
    linears.wgrad_gemm_accum_fp32 = lambda *given: calls.append(given) or product(*given)
    for name, settings in CASES.items():
        expected = outcome(path, case, layout, **settings)
        assert not calls
        linears.DEVICES.append("cpu")
        ours = outcome(path, case, layout, **settings)
        linears.DEVICES.remove("cpu")
        found[name] = {"calls": len(calls), "difference": largest_difference(ours, expected)}
        calls.clear()
    return found


@pytest.mark.long
def test_gradients_that_linears_add_themselves_are_the_same(tmp_path):
    source = open_source(build_tiny_checkpoint("gemma3", tmp_path / "model"))
    parity.save_case(source, ["it", "t"], tmp_path / "case.pt")
    layers = source.description.text.num_hidden_layers
    paths = str(tmp_path / "model"), str(tmp_path / "case.pt")
    for rank in run_distributed(2, every_case, *paths, ParallelConfig(tp=2)):
        for name, found in rank.items():
            trained = 0 if name in ("frozen", "adapters") else LINEARS * MICRO_BATCHES
            assert found["calls"] == trained * layers, name
            assert found["difference"] <= LARGEST["bf16" if name == "bf16" else "fp32"], name
        assert rank["bf16"]["difference"] > LARGEST["fp32"]  # which is not rounded to 16 bits in between


@pytest.mark.long
def test_gradients_that_experts_add_themselves_are_the_same(tmp_path):
    """Of two ranks with half of the experts each. The linears are those of attention alone."""
    source = open_source(build_tiny_checkpoint("qwen3_vl_moe", tmp_path / "model"))
    parity.save_case(source, ["it", "t"], tmp_path / "case.pt")
    of_linears = 2 * source.description.text.num_hidden_layers
    paths = str(tmp_path / "model"), str(tmp_path / "case.pt")
    for rank in run_distributed(2, every_case, *paths, ParallelConfig(ep=2)):
        for name, found in rank.items():
            trained = name not in ("frozen", "adapters")
            assert found["calls"] > 2 * of_linears if trained else not found["calls"], name
            assert found["difference"] <= LARGEST["bf16" if name == "bf16" else "fp32"], name
        assert rank["bf16"]["difference"] > LARGEST["fp32"]  # which is not rounded to 16 bits in between


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_before_a_run_sees_a_product_that_does_not_add(monkeypatch, dtype):
    device = torch.device("cpu")

    def checked(**settings) -> None:
        check("weight_gradients", weight_gradient_disagreement(device, dtype), ModelConfig(**settings))

    def sets(x, grad, total):
        total.copy_(grad.t().float() @ x.float())

    monkeypatch.setattr(linears, "in_product", True)
    checked()
    assert linears.in_product
    monkeypatch.setattr(kernel_checks, "wgrad_gemm_accum_fp32", sets)
    with pytest.raises(ConfigError, match=r"differ by .+ model.fallbacks=\[weight_gradients\] trains with"):
        checked()
    assert linears.in_product
    with pytest.warns(UserWarning, match="made first and then added"):
        checked(fallbacks=["weight_gradients"])
    assert not linears.in_product
    x, grad, total = torch.randn(5, 3, dtype=dtype), torch.randn(5, 4, dtype=dtype), torch.ones(4, 3)
    wgrad_gemm_accum_fp32(x, grad, total)
    assert torch.equal(total, torch.ones(4, 3) + grad.t() @ x)
