"""A user's loss of tokens: examples/extend/losses.py equals torch on Transformers' logits in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity
import pytest
import saved_cases
import torch
from sources import write_sharegpt

from megatron_vlm.recipes import compose
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

FILE = Path(__file__).parents[3] / "examples/extend/losses.py"
LOSSES = ("focal", "smoothed", "with_z_loss")
WEIGHTS = np.float32([0.3, 1.0, 2.5])
LAYOUTS = ["TP2+SP", "PP2", "PP2·VPP2", "CP2", "DP2 dist. optimizer"]


def reference(name: str, logits_NV: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor):
    """The sum by torch's own functions."""
    cross_entropy, log_sum = torch.nn.functional.cross_entropy, logits_NV.logsumexp(-1)
    losses = cross_entropy(logits_NV, labels_N, reduction="none")
    if name == "focal":
        losses = (1 - logits_NV.softmax(-1)[range(len(labels_N)), labels_N]) ** 2 * losses
    elif name == "smoothed":
        losses = cross_entropy(logits_NV, labels_N, reduction="none", label_smoothing=0.1)
    else:
        losses = losses + 1e-4 * log_sum**2
    return (losses * weights_N).sum()


def cases_of(path: Path) -> dict[str, dict]:
    """Batches, with the loss and gradients of each function on the logits of Transformers' model."""
    from megatron_vlm.weight_files import hub_name

    theirs, cases = parity.Reference(path), {}
    hf, batch, rows = parity.encode(theirs.processor, theirs.description, ["t", "it", "ititit", "t"])
    trained = batch["loss_mask"] > 0
    weights = batch["loss_mask"]
    weights[trained] = torch.from_numpy(np.resize(WEIGHTS, int(trained.sum())))
    for name in LOSSES:
        theirs.model.zero_grad(set_to_none=True)
        output = theirs.model(**hf, use_cache=False)
        total = reference(name, output.logits[trained], batch["labels"][trained], weights[trained])
        loss = total / weights.sum()
        loss.backward()
        named = theirs.model.named_parameters()
        grads = {hub_name(key, theirs.description.renames): param.grad for key, param in named}
        logits = output.logits.detach()
        cases[name] = {"batch": batch, "rows": rows, "logits": logits, "loss": loss.item(), "grads": grads}
    return cases


def measure(layouts: list[str], path: str, cases: str) -> list[dict]:
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.parallel import setup

    rows, held = [], saved_cases.read(cases)
    for layout in layouts:
        settings = parity.LAYOUTS[layout][1]
        if not torch.distributed.is_initialized():
            setup.init_distributed(settings, seed=1)
        setup.reset_layout(settings, seed=1)
        model = parity.Model(settings, path)
        for name in LOSSES:
            model.run.train.objective = f"{FILE}:{name}"
            model.step_loss = objective_of(model.run).step_loss(model.run, model.chunks)
            rows.append({"layout": layout, "loss": name} | model.compare(held[name]))
    return rows


def train_by(function: str, folder: str, checkpoint: str) -> str:
    """What ends a run by this loss."""
    from megatron_vlm.training.loop import train

    settings = ["steps=2", "tp=1", "num_workers=0", "data.dataset_type=hf", f"train.objective={function}"]
    paths = {"run_dir": f"{folder}/run", "hf_path": checkpoint, "train_data_path": f"{folder}/data.jsonl"}
    with pytest.raises(ValueError) as ended:
        train(compose("gemma3_tiny_digits", settings=settings, arguments=paths))
    return str(ended.value)


def test_a_loss_that_is_not_finite_is_named_by_its_function(tmp_path, tiny_gemma3):
    write_sharegpt(tmp_path, 8)
    own = tmp_path / "own.py"
    own.write_text("def nan(log_probs):\n    return (log_probs / (len(log_probs) == 2)).sum()\n")
    [text] = run_distributed(1, train_by, f"{own}:nan", str(tmp_path), str(tiny_gemma3))
    assert text.startswith("training: the loss is -inf over ")
    assert text.endswith(
        f"micro batches [0], from train.objective: {own}:nan, which got finite log-probabilities. "
        "Correct that function."
    )


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl_moe", marks=pytest.mark.long)])
def test_loss_and_gradients_are_torchs_on_transformers_logits(family, tmp_path):
    path = build_tiny_checkpoint(family, tmp_path / "checkpoint")
    torch.save(cases_of(path), tmp_path / "cases.pt")
    layouts = [name for name in LAYOUTS if name in parity.layouts_of(family)]
    rows = run_distributed(2, measure, layouts, str(path), str(tmp_path / "cases.pt"), timeout=900)[0]
    assert len(rows) == len(layouts) * len(LOSSES)
    assert [row for row in rows if not row["passed"]] == []
