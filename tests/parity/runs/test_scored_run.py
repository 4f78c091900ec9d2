"""A run whose answers are scored while it trains: its curve, its best checkpoint, a command for an export."""

import json
from pathlib import Path

import pytest
from sources import record, write_sharegpt

from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.extras.evaluate.answering import scored
from megatron_vlm.extras.evaluate.metrics import metric_of
from megatron_vlm.recipes import compose
from tiny.distributed import run_distributed

ROWS = 12
METRIC = """
asked = 0

def worse(answer, references, question):
    global asked
    asked += 1
    return 1 / asked
"""
COMMAND = """
echo "told of $1, rank $RANK"
ls "$1"
case "$1" in *4) exit 3;; esac
echo '{"files": 7}'
"""


def train_both(root: str, checkpoint: str) -> None:
    """In the same processes, one after the other."""
    train_scored(root, "plain", checkpoint)
    train_scored(root, "scored", checkpoint, *scored_settings(Path(root)))


def train_scored(root: str, name: str, checkpoint: str, *others: str) -> None:
    from megatron_vlm.training.loop import train

    settings = ["steps=4", "tp=1", "micro_batch_size=1", "global_batch_size=4", "num_workers=0"]
    settings += ["data.dataset_type=hf", "train.eval_every=0", "optimizer.lr=0.01", *others]
    paths = {"run_dir": f"{root}/{name}", "hf_path": checkpoint, "train_data_path": f"{root}/data.jsonl"}
    train(compose("gemma3_tiny_digits", settings=settings, arguments=paths))


def scored_settings(root: Path) -> list[str]:
    scored = [f"data.score_path={root}/data.jsonl", "train.score_every=2", "train.score_samples=5"]
    scored += [f"train.score_metric=[{root}/metric.py:worse,contained]", "train.score_tokens=3"]
    scored += ["train.save_every=2", "train.keep_checkpoints=1", "train.keep_best=true"]
    scored += ["train.best_by=score/worse"]
    return [*scored, "train.export_every=2", f"train.on_export=sh {root}/export.sh"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_gemma3) -> Path:
    """Runs on two ranks: `plain`, and `scored` with a metric that only becomes worse."""
    folder = tmp_path_factory.mktemp("scored")
    write_sharegpt(folder, ROWS)
    (folder / "data.jsonl").write_text("".join(json.dumps(record(n)) + "\n" for n in range(ROWS)))
    (folder / "metric.py").write_text(METRIC)
    (folder / "export.sh").write_text(COMMAND)
    run_distributed(2, train_both, str(folder), str(tiny_gemma3))
    return folder


def test_scores_are_logged_and_change_nothing_that_is_trained(folder):
    plain, scored = (list(read_rows(folder / name / "metrics.jsonl")) for name in ("plain", "scored"))
    assert [row["step"] for row in scored if "score/worse" in row] == [2, 4]
    losses = [[(row["loss"], row["grad_norm"]) for row in rows if "loss" in row] for rows in (plain, scored)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_each_metric_of_a_list_scores_the_same_answers(folder):
    rows = [row for row in read_rows(folder / "scored/metrics.jsonl") if "score/worse" in row]
    assert [set(row) for row in rows] == [{"step", "score/worse", "score/contained"}] * 2
    for row in rows:
        file = folder / f"scored/scores/step_{row['step']:08d}.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == 5 and all(record["references"] for record in records)
        metrics = {"contained": metric_of("contained")}
        assert row["score/contained"] == scored(records, metrics, None).scores["contained"].score


def test_the_checkpoint_of_the_best_score_is_kept(folder):
    kept = sorted(path.name for path in (folder / "scored/checkpoints").glob("step_*"))
    assert kept == ["step_00000002", "step_00000004"]
    assert (folder / "scored/checkpoints/best").read_text().strip() == "step_00000002"
