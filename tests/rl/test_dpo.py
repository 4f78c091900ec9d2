"""DPO as the objective of a run: loss and gradients are those of Transformers, and a resumed run goes on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import dpo_parity
import parity
import pytest
from safetensors.torch import load_file
from sources import image_bytes

from tiny.distributed import run_distributed


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    layouts = parity.LAYOUTS
    return parity.measured(request, tmp_path_factory, layouts, dpo_parity.cases_of, dpo_parity.measure)


@pytest.mark.parametrize(("family", "layout"), parity.cells(dpo_parity.layouts_of, ("TP2+SP",)))
def test_loss_and_gradients_are_those_of_transformers(rows_of, family, layout):
    rows = rows_of(parity.LAYOUTS[layout][0])
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert [row["rows"] for row in found] == ["single", "packed"]
    for row in found:
        assert row["loss"] <= 1e-5 and row["valid"] <= 1e-5 and row["gradient"][0] <= 1e-4, row
        assert not row["without a gradient"]
        margins, figures = row["expected"]["margin"], row["figures"]
        assert min(map(abs, margins)) > 1e-3  # the model has left its start
        assert figures["margin"] == pytest.approx(sum(margins) / 4, abs=1e-5)
        assert figures["accuracy"] == sum(margin > 0 for margin in margins) / 4
        rewards = figures["reward_chosen"] - figures["reward_rejected"]
        assert rewards == pytest.approx(figures["margin"], abs=1e-5)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """20 pairs with an image each, two broken ones, and one whose rejected answer is too long for a row."""
    folder = tmp_path_factory.mktemp("pairs")
    question, found = "<image>What is in the image?", []
    for n in range(20):
        (folder / f"{n}.jpg").write_bytes(image_bytes(n))
        pair = {"chosen": f"a street sign {n}", "rejected": f"the sofa and {n} apples"}
        found.append({"images": [f"{n}.jpg"], "prompt": question} | pair)
    found += [found[0] | {"rejected": found[0]["chosen"]}, {"prompt": "What?", "chosen": "a table"}]
    found.append(found[1] | {"rejected": "a very long one " * 100})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder / "rows.jsonl"


def metrics(folder: Path) -> list[dict]:
    """Without times, and drops: a resumed loader counts again those that it encodes again."""
    timed = ("second", "tflops", "memory", "dropped")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in found]


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_gemma3, rows, adapter):
    """It is made to go on from the checkpoint before its last: with the first weights as its reference."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_distributed(2, dpo_parity.train_run, str(tiny_gemma3), str(rows), str(whole), adapter)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "exports")
    (resumed / "checkpoints/latest").write_text("step_00000002")
    run_distributed(2, dpo_parity.train_run, str(tiny_gemma3), str(rows), str(resumed), adapter)

    steps = [row for row in metrics(whole) if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7) and steps[0]["margin"] == 0
    assert steps[3]["margin"] > 0.01 and steps[3]["loss"] < steps[0]["loss"]
    assert [row["step"] for row in metrics(whole) if row.get("valid_accuracy") is not None] == [2, 4]
    assert metrics(resumed) == metrics(whole)
    written = [folder / "exports/step_00000004" for folder in (whole, resumed)]
    (name,) = (path.name for path in written[0].glob("*.safetensors"))
    one, other = (load_file(folder / name) for folder in written)
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    dropped = [json.loads(line) for line in (whole / "drops/rank0.jsonl").read_text().splitlines()]
    reasons = {drop["key"]: drop["reason"] for drop in dropped}
    broken = {"000000020": "bad_preference", "000000021": "bad_preference", "000000022": "over_length"}
    assert reasons.items() <= broken.items()
