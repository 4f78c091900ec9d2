"""`train.on_spike`: what is a spike, what is done with it, and that a resumed run does the same."""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
from run_results import Killed, KilledAfter, figures, saved_tensors
from sources import write_sharegpt

from megatron_vlm.callbacks import Callback, spikes
from megatron_vlm.callbacks.spikes import MOST_IN_A_ROW, WINDOW, Spikes
from megatron_vlm.recipes import compose
from tiny.distributed import run_distributed

STEPS = 24


def level(steps: int = WINDOW // 2, on_spike: str = "skip") -> Spikes:
    judge = Spikes(on_spike)
    assert all(judge.trains(2 + 0.1 * (step % 2), 1 + 0.1 * (step % 3)) for step in range(steps))
    return judge


def test_a_spike_is_six_deviations_above_the_steps_before():
    judge = level()
    before = json.loads(json.dumps(judge.state_dict()))  # as a checkpoint holds it
    assert not judge.trains(2.4, 1.0) and judge.why.startswith(
        "the loss is 2.4, and was 2.05 ± 0.05 in the 64"
    )
    assert not judge.trains(2.0, 9.0) and judge.why.startswith("the gradient norm is 9")
    assert judge.trains(2.3, 1.0) and judge.trains(0.0, 0.0) and not judge.why
    assert judge.count == 2
    resumed = Spikes("skip")
    resumed.load_state_dict(before)
    assert not resumed.trains(2.4, 1.0)
    assert level(WINDOW // 2 - 1).trains(99, 99)


def test_what_was_skipped_is_no_measure_for_what_comes_and_too_many_end_the_run():
    judge = level()
    for _ in range(MOST_IN_A_ROW):
        assert not judge.trains(9, 1)
    with pytest.raises(ValueError, match="the 10 steps before, which were skipped; the weights were not"):
        judge.trains(9, 1)
    warned = level(on_spike="warn")
    assert warned.trains(9, 1) and warned.why and not warned.skipped
    with pytest.raises(ValueError, match="the loss is 9.*train.on_spike=skip"):
        level(on_spike="stop").trains(9, 1)


def runs(root: str, checkpoint: str) -> None:
    """On every rank: a run that judges nothing, one that warns, one that skips, and one killed in between."""
    spikes.WINDOW, spikes.SIGMAS = 8, 1.5  # so that steps of this data are spikes
    for name, on_spike, callbacks in (
        ("plain", "null", []),
        ("warn", "warn", []),
        ("skip", "skip", []),
        ("killed", "skip", [KilledAfter(STEPS // 2)]),
        ("killed", "skip", []),
    ):
        try:
            train_once(root, name, checkpoint, on_spike, callbacks)
            assert not callbacks
        except Killed:
            from megatron_vlm.parallel import setup

            setup.shutdown()


def train_once(root: str, name: str, checkpoint: str, on_spike: str, callbacks: list[Callback]) -> None:
    from megatron_vlm.training.loop import train

    settings = [f"steps={STEPS}", "tp=1", "micro_batch_size=1", "global_batch_size=2", "num_workers=0"]
    settings += ["data.dataset_type=hf", "train.save_every=1", "optimizer.lr=1e-5", "train.async_save=false"]
    settings += [f"train.on_spike={on_spike}", "train.keep_checkpoints=30", "logging.report=false"]
    settings += [f"data.train_data_path=[{root}/a.jsonl,{root}/b.jsonl]"]
    paths = {"run_dir": f"{root}/{name}", "hf_path": checkpoint}
    with open(f"{root}/{name}.{os.environ['RANK']}.txt", "a") as said, contextlib.redirect_stdout(said):
        train(compose("gemma3_tiny_digits", settings=settings, arguments=paths), callbacks=callbacks)


def alike(run_dir: Path, step: int) -> bool:
    """Whether a step has left all weights as they were."""
    before, after = saved_tensors(run_dir, step - 1), saved_tensors(run_dir, step)
    parameters = [name for name in before if "optimizer" not in name]
    assert parameters
    return all(before[name].equal(after[name]) for name in parameters)


@pytest.mark.long
def test_a_skipped_step_changes_no_weight_and_a_resumed_run_skips_the_same(tiny_gemma3, tmp_path):
    for name in ("a", "b"):
        write_sharegpt(tmp_path, 20, f"{name}.jsonl")
    run_distributed(2, runs, str(tmp_path), str(tiny_gemma3))
    said = (tmp_path / "skip.0.txt").read_text()
    plain, warn, skip, killed = (figures(tmp_path / name) for name in ("plain", "warn", "skip", "killed"))
    assert [{**row, "spikes": 0} for row in plain] == [{**row, "spikes": 0} for row in warn]
    assert killed == skip and warn[-1]["spikes"] >= 1 and len(skip) == STEPS
    counts = [row["spikes"] for row in skip]
    skipped = [step for step in range(2, STEPS + 1) if counts[step - 1] > counts[step - 2]]
    assert skipped
    for step in skipped:
        assert alike(tmp_path / "skip", step)
        assert skip[step - 1]["trained_tokens"] == skip[step - 2]["trained_tokens"]
        line = re.search(rf"step {step}: the .*; not trained; samples .*", said)[0]
        assert line.endswith(f"megatron-vlm replay {tmp_path}/skip --step {step} --output page.html")
    assert not alike(tmp_path / "skip", next(step for step in range(2, STEPS + 1) if step not in skipped))
