"""Trackers and callbacks get what a run logs."""

from __future__ import annotations

import csv
import math

import pytest
from logged_runs import begun_run, log_step, saved, validate

from megatron_vlm.callbacks import Callback, Run, callback_class
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.overrides import apply_overrides

OWN = """
from megatron_vlm.callbacks import Callback

class Mine(Callback):
    def on_train_begin(self, run):
        self.file = open(run.config.run_dir + "/mine.txt", "w")
        self.file.write(f"after {run.step}\\n")
    def on_log(self, run, step, metrics):
        self.file.write(f"{step} {metrics.get('loss', metrics.get('valid_loss'))}\\n")
    def close(self):
        self.file.close()

class Fails(Mine):
    ends_run = False
    def on_log(self, run, step, metrics):
        raise TimeoutError("no server")

class Other: ...
"""


def tracked(folder, *trackers, own=(), done=0, **more) -> Run:
    settings = {"run_dir": str(folder), "logging.tensorboard": False, "logging.trackers": [*trackers]}
    return begun_run(apply_overrides(RunConfig(), settings), 3, *own, done=done, **more)


def finish(run: Run) -> None:
    for step in range(run.step + 1, 4):
        log_step(run, math.nan if step == 2 else 1 / step)
        if step == 2:
            validate(run, 0.7, **{"valid_loss/a": 0.9})
            saved(run)
    run.callbacks.on_train_end(run)
    run.callbacks.close()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_class_of_a_users_file_gets_each_row(own, tmp_path):
    finish(tracked(tmp_path / "run", own=[callback_class(f"{own}:Mine")()]))
    assert (tmp_path / "run/mine.txt").read_text() == "after 0\n1 1.0\n2 nan\n2 0.7\n3 0.3333333333333333\n"


def test_one_that_may_fail_is_told_of_once_and_ends_nothing(own, tmp_path, capsys):
    finish(tracked(tmp_path / "run", own=[callback_class(f"{own}:{name}")() for name in ("Fails", "Mine")]))
    said = capsys.readouterr().out
    assert said.count("Fails failed and is called no more: TimeoutError: no server") == 1
    assert "3 0.3333" in (tmp_path / "run/mine.txt").read_text()


def test_csv_has_all_rows_and_columns_also_after_a_resume(tmp_path):
    finish(tracked(tmp_path, "csv"))
    finish(tracked(tmp_path, "csv", done=2))
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["valid_loss"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "", ""),
        ("2", "", "0.7"),
        ("3", "0.3333333333333333", ""),
    ]


@pytest.mark.parametrize("name", ["mlflo", "none.py:Mine", "own.py", ":Mine"])
def test_what_is_no_callback_is_refused_before_the_start(name):
    with pytest.raises(ConfigError, match="train.callbacks: .*(give FILE.py:NAME|does not exist)"):
        callback_class(name)


class Notes(Callback):
    def __init__(self):
        self.heard = []

    def on_step_end(self, run, metrics):
        self.heard.append(("step", run.step, metrics["lr"]))

    def on_validation_end(self, run, metrics):
        self.heard.append(("validation", run.step, dict(metrics)))

    def on_save(self, run, checkpoint):
        self.heard.append(("save", run.step, checkpoint.name))

    def on_train_end(self, run):
        self.heard.append(("end", run.step))

    def state_dict(self):
        return {"heard": len(self.heard)}

    def load_state_dict(self, state):
        self.heard.append(("loaded", state["heard"]))


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_callbacks_hear_of_steps_validation_saves_and_the_end_on_every_rank(tmp_path, is_first_rank):
    notes = Notes()
    finish(tracked(tmp_path, own=[notes], is_first_rank=is_first_rank))
    assert notes.heard == [
        ("step", 1, 0.1),
        ("step", 2, 0.1),
        ("validation", 2, {"valid_loss": 0.7, "valid_loss/a": 0.9}),
        ("save", 2, "step_00000002"),
        ("step", 3, 0.1),
        ("end", 3),
    ]


def test_two_callbacks_of_one_class_have_their_own_state(tmp_path):
    first, second = Notes(), Notes()
    run = tracked(tmp_path, own=[first, second])
    log_step(run)
    second.heard.clear()
    state = run.callbacks.state_dict()
    name = f"{Notes.__module__}.Notes"
    assert [state[name], state[f"{name} 2"]] == [{"heard": 1}, {"heard": 0}]
    run.callbacks.load_state_dict(state)
    assert first.heard[-1] == ("loaded", 1) and second.heard[-1] == ("loaded", 0)
    run.callbacks.close()


class FailsAtItsEnd(Callback):
    def close(self):
        raise ValueError("at its end")


class SaysWhenClosed(Callback):
    closed = False

    def close(self):
        self.closed = True


def test_all_callbacks_are_closed_also_if_one_fails(tmp_path):
    earlier = SaysWhenClosed()  # they are closed in the reverse order
    run = tracked(tmp_path, own=[earlier, FailsAtItsEnd()])
    log_step(run)
    with pytest.raises(ValueError, match="at its end"):
        run.callbacks.close()
    assert earlier.closed


def test_a_callback_ends_the_run_after_the_step_that_has_begun(tmp_path):
    run = tracked(tmp_path)
    log_step(run)
    run.stop("enough")
    assert (run.milestones.last, run.milestones.why) == (2, "ended after step 2 of 3: enough")
    run.callbacks.close()
