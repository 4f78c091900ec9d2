"""Adapters equal peft's, in every layout, on every family: logits, loss and gradients, fp32 on CPU."""

from __future__ import annotations

import copy

import adapter_parity
import parity
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.adapters.lora import Lora, LoRAHook
from megatron_vlm.models.adapters.targets import Target
from megatron_vlm.models.weights.rules import Rule, Whole
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(
        request, tmp_path_factory, adapter_parity.LAYOUTS, adapter_parity.cases, adapter_parity.measure
    )


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
    LoRAHook(linear, {0: lora}, target, 0.4)
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


def read_adapter(path: str, start: str) -> dict[str, torch.Tensor]:
    """The tensors of the folder `start`, as the model in one process holds them, by peft's keys."""
    from megatron_vlm.models.adapters.model import adapter_tensors
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    model = parity.Model(ParallelConfig(), path, start)
    return {key: tensor.clone() for key, tensor in adapter_tensors(model.chunks)}


@pytest.mark.parametrize(
    ("family", "older"), [("qwen2_5_vl", ("model.", "visual.")), ("gemma3", ("language_model.model.",))]
)
def test_names_of_older_transformers_are_read_as_transformers_reads_them(family, older, tmp_path):
    path, folder = build_tiny_checkpoint(family, tmp_path / "base"), tmp_path / "adapter"
    adapter_parity.peft_model(path, {"r": 2, "target_modules": ["q_proj", "v_proj"]}).save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    prefixes = zip(("model.language_model.", "model.visual."), older, strict=False)
    for name, old_name in prefixes:
        start, old_start = f"base_model.model.{name}", f"base_model.model.{old_name}"
        tensors = {key.replace(start, old_start): tensor for key, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    theirs.load_adapter(str(folder))
    read = {k.replace(".default", ""): v for k, v in theirs.state_dict().items() if "lora_" in k}
    [ours] = run_distributed(1, read_adapter, str(path), str(folder))
    assert ours.keys() == {f"base_model.model.{key}" for key in read} and len(ours) == len(tensors)
    assert all(ours[f"base_model.model.{key}"].equal(tensor) for key, tensor in read.items())


INPUTS = [*adapter_parity.INPUTS, *adapter_parity.PACKED]
CELLS = parity.cells_of_pairs(
    adapter_parity.layouts_of,
    lambda _: INPUTS,
    adapter_parity.OFTEN,
    adapter_parity.LAYOUTS,
    adapter_parity.factors,
)


@pytest.mark.parametrize(("family", "layout", "inputs"), CELLS)
def test_equals_peft(rows_of, family, layout, inputs):
    rows = rows_of(adapter_parity.LAYOUTS[layout][0])
    mine = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert {row["input"] for row in mine} >= {*inputs}
    for row in mine:
        assert row["passed"], row
