"""A run ends when its best figure was not better for `train.patience` times, also when it was killed."""

from pathlib import Path

import pytest
from run_results import Killed, KilledAfter, figures
from sources import write_sharegpt

from megatron_vlm.callbacks import Callback
from megatron_vlm.callbacks.validation import Best
from megatron_vlm.config import TrainConfig
from megatron_vlm.extras.report.history import read_history
from megatron_vlm.recipes import compose
from tiny.distributed import run_distributed

SAID = "valid_loss was best after step 2, and no better in the 3 times since (train.patience)"


def train_patiently(root: str, checkpoint: str) -> None:
    """The whole run, the same one killed and resumed, and the resumed one once more: no step is left."""
    for name, killed in (("whole", None), ("killed", 5), ("killed", None), ("killed", None)):
        try:
            train_once(root, name, checkpoint, [KilledAfter(killed)] if killed else [])
            assert killed is None
        except Killed:
            from megatron_vlm.parallel import setup

            setup.shutdown()


def train_once(root: str, name: str, checkpoint: str, callbacks: list[Callback]) -> None:
    """The loss falls and more of it is taken for better, so the first validation is the best."""
    from megatron_vlm.training.loop import train

    settings = ["steps=20", "tp=1", "micro_batch_size=1", "global_batch_size=2", "num_workers=0"]
    settings += ["data.dataset_type=hf", "train.eval_every=2", "train.save_every=4", "optimizer.lr=0.01"]
    settings += ["train.patience=3", "train.best_by=max:valid_loss", "train.async_save=false"]
    paths = {"run_dir": f"{root}/{name}", "hf_path": checkpoint, "train_data_path": f"{root}/data.jsonl"}
    paths["valid_data_path"] = f"{root}/data.jsonl"
    train(compose("gemma3_tiny_digits", settings=settings, arguments=paths), callbacks=callbacks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_gemma3) -> Path:
    folder = tmp_path_factory.mktemp("patience")
    write_sharegpt(folder, 8)
    run_distributed(2, train_patiently, str(folder), str(tiny_gemma3))
    return folder


@pytest.mark.long
def test_a_killed_run_ends_at_the_same_step_with_the_same_figures(folder):
    """It is killed between its second and third validation, and was saved at the second."""
    whole, killed = (read_history(folder / name) for name in ("whole", "killed"))
    assert whole.step == killed.step == 8
    assert [row["step"] for row in whole.rows if "valid_loss" in row] == [2, 4, 6, 8]
    assert figures(folder / "killed") == figures(folder / "whole")
    assert [start["step"] for start in killed.starts] == [1, 5, 9]


@pytest.mark.long
def test_its_state_is_finished_and_says_why(folder):
    for name in ("whole", "killed"):
        history = read_history(folder / name)
        assert (history.state, history.last_line) == ("finished", SAID)
        assert (folder / name / "checkpoints/latest").read_text() == "step_00000008\n"


def rated(best: Best, values: list[float], name: str, higher: list[str] = ()) -> list[float]:
    return [best.rate(step, {name: value}, higher) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("by", "name", "higher", "values", "saved"),
    [
        ("valid_loss/charts", "valid_loss/charts", [], [3, 2, 2, 4], (2, 2, 2)),
        ("score/anls", "score/anls", ["score/anls"], [0.1, 0.3, 0.2], (-0.3, 2, 1)),
        ("score/wer", "score/wer", [], [0.3, 0.2, 0.1], (0.1, 3, 0)),
        ("valid_reward", "valid_reward", [], [0.5, 0.7, float("nan")], (-0.7, 2, 1)),
        ("max:valid_accuracy", "valid_accuracy", [], [0.5, 0.7, float("nan")], (-0.7, 2, 1)),
        ("min:score/anls", "score/anls", ["score/anls"], [0.1, 0.3], (0.1, 1, 1)),
    ],
)
def test_the_best_is_known_for_each_kind_of_figure(by, name, higher, values, saved):
    best = Best(TrainConfig(best_by=by, patience=2))
    rated(best, values, name, higher)
    assert tuple(best.saved.values()) == (by, *saved)
    assert best.is_over == (saved[2] == 2)
    resumed, other = Best(TrainConfig(best_by=by)), Best(TrainConfig(best_by="score/other"))
    resumed.load_state_dict(best.state_dict())
    other.load_state_dict(best.state_dict())
    assert resumed.saved == best.saved and other.saved["step"] == 0
