"""The examples of examples/extend in a run of the command."""

from __future__ import annotations

import json
from pathlib import Path

from programs import COMMAND, run_program
from sources import write_sharegpt

from tiny.checkpoints import build_tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples/extend"

TRACKER = """
from megatron_vlm.callbacks import Callback


class Rows(Callback):
    def on_log(self, run, step, metrics):
        run.message(f"row {sorted(metrics)}")
"""


def test_a_run_by_the_recipe_the_loss_and_the_callback_of_the_examples(tmp_path):
    checkpoint = build_tiny_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    data = write_sharegpt(tmp_path / "source", 12)
    (tmp_path / "own_rows.py").write_text(TRACKER)
    flags = [
        f"--recipe={EXAMPLES}/recipe.py:receipts",
        f"--hf_path={checkpoint}",
        f"--train_data_path={data}",
    ]
    settings = ["resolution=low", "tp=1", "steps=4", "train.global_batch_size=2", "data.num_workers=0"]
    settings += ["dtype=fp32", f"logging.trackers=[{tmp_path}/own_rows.py:Rows]", f"run_dir={tmp_path}/run"]
    ended = run_program(COMMAND, "train", *flags, *settings)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "lr" in row]
    assert len(steps) == 4 and all(0 < row["loss"] < row["cross_entropy"] for row in steps)
    assert any("mine/steps_below" in row for row in rows)
    assert "saved in " in ended.stdout and "row ['cross_entropy'" in ended.stdout
    config = (tmp_path / "run/config.yaml").read_text()
    assert f"max_pixels: {640 * 28**2}" in config and "r: 16" in config
