"""Adapters equal peft's, in every layout, on every family: logits, loss and gradients, fp32 on CPU."""

from __future__ import annotations

import copy
import functools

import adapter_parity
import parity
import pytest
import torch
from test_parity import write_report

from megatron_vlm.models.adapters.lora import Lora, adapt
from megatron_vlm.models.adapters.targets import Target
from megatron_vlm.models.weights import Rule, Whole
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    """The measurements of a family; WRITE_REPORTS=1 puts them into reports/parity.json."""

    @functools.cache
    def rows(family: str) -> list[dict]:
        folder, found = tmp_path_factory.mktemp(family), []
        path, cases = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "cases.pt"
        torch.save(adapter_parity.cases(path, folder), cases)
        for processes in (1, 2):
            names = parity.asked_for(request, family, processes, adapter_parity.LAYOUTS)
            if not names:
                continue
            arguments = names, str(path), str(cases)
            measured = run_distributed(processes, adapter_parity.measure, *arguments, timeout=900)
            found += [{"family": family} | row for row in measured[0]]
        write_report(family, found)
        return found

    return rows


def test_dora_with_dropout_is_that_of_peft():
    """Inputs are dropped in what the adapter changes, and not in what the frozen weight computes."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 6)
    model = torch.nn.Sequential(copy.deepcopy(linear))
    settings = LoraConfig(r=3, lora_alpha=6, target_modules=["0"], use_dora=True, lora_dropout=0.4)
    layer = get_peft_model(model, settings).base_model.model[0]
    theirs = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    theirs.append(layer.lora_magnitude_vector.default.weight)
    target = Target("0", Rule("0.weight", ("0.weight",), Whole()), "0.weight", 0, 6, 8, 3, 2.0, True)
    linear.requires_grad_(False)
    lora = Lora(target, linear.weight, seed=1)
    adapt(linear, {0: lora}, target, 0.4)
    ours = [lora.lora_A, lora.lora_B, lora.lora_magnitude_vector]
    with torch.no_grad():
        for mine, of_peft in zip(ours, theirs, strict=True):
            mine.copy_(of_peft.copy_(torch.rand_like(of_peft) + 0.1))
    x, outputs = torch.randn(5, 8), []
    for module in (linear.train(), layer.train()):
        torch.manual_seed(7)
        outputs.append(module(x))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs)
    for mine, of_peft in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, of_peft.grad)
    assert not torch.allclose(outputs[0], linear.eval()(x), atol=1e-2), "nothing was dropped"


@pytest.mark.parametrize(
    ("family", "layout"),
    parity.cells(adapter_parity.layouts_of, adapter_parity.OFTEN, adapter_parity.OF_EACH, ("gemma3",)),
)
def test_equals_peft(rows_of, family, layout):
    mine = [row for row in rows_of(family) if row["layout"] == layout]
    assert [row["input"] for row in mine] == [*adapter_parity.INPUTS, *adapter_parity.PACKED]
    for row in mine:
        assert row["passed"], row
