"""Runs of the command on what others have: the examples of examples/extend, and plain shards."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from prepared_shards import add_part
from programs import COMMAND, run_program
from sources import image_bytes, write_sharegpt

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


def test_a_run_on_img2datasets_shards_that_were_indexed_in_place(tmp_path, tiny_gemma3):
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        with tarfile.open(shards / f"{shard:05d}.tar", "w") as tar:
            for key in (f"{shard:05d}{n:04d}" for n in range(4)):
                caption = json.dumps({"caption": f"caption {key}", "url": "http://a/b.jpg", "key": key})
                parts = {"jpg": image_bytes(1), "txt": f"caption {key}".encode(), "json": caption.encode()}
                for name, content in parts.items():
                    add_part(tar, f"{key}.{name}", content)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards.iterdir()}
    indexed = run_program(COMMAND, "prepare", shards)
    assert indexed.returncode == 0, indexed.stderr
    assert indexed.stdout.endswith("  train: 8 samples in 2 shards\n")
    flags = ["--recipe=gemma3_tiny_digits", f"--hf_path={tiny_gemma3}", f"--train_data_path={shards}"]
    flags += ["--dataset_type=energon", f"--run_dir={tmp_path}/run"]
    settings = ["tp=1", "steps=1", "global_batch_size=2", "micro_batch_size=2", "data.num_workers=0"]
    ended = run_program(COMMAND, "train", *flags, *settings)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("loss", 0) > 0 and row["trained_tokens"] > 0] == [1]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    repeated = run_program(COMMAND, "prepare", shards)
    assert repeated.returncode == 2
    assert "shards has an index of Energon; train from it as it is" in repeated.stderr
