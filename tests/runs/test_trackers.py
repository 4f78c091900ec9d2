"""Trackers and callbacks get what a run logs."""

from __future__ import annotations

import csv
import math
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from logged_runs import begun_run, log_step, saved, validate
from slurm import wait_for

from megatron_vlm.callbacks import Callback, Run, callback_class
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.commands.arguments import check_run_folder
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


def test_a_class_that_is_not_there_or_no_callback_is_refused_before_the_start(own, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name in ("Theirs", "Other"):
        settings = {"run_dir": str(tmp_path / "run"), "train.callbacks": [f"{own}:{name}"]}
        with pytest.raises(ConfigError, match=f"own.py:{name} is no subclass of Callback in that file"):
            check_run_folder(apply_overrides(RunConfig(), settings))


def test_one_that_cannot_be_made_is_told_as_the_users(own):
    own.write_text(OWN + "class Odd(Mine):\n    def __init__(self, a): ...\n")
    with pytest.raises(ConfigError, match="train.callbacks: .*own.py:Odd: TypeError: .*; correct the file.$"):
        callback_class(f"{own}:Odd")()


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


class Forgets(Callback):
    def before_optimizer_step(self, run, loss, grad_norm):
        self.loss = loss


def test_a_callback_that_gives_no_answer_about_a_step_is_named(tmp_path):
    run = tracked(tmp_path, own=[Forgets()])
    assert run.callbacks.judge_steps
    with pytest.raises(TypeError, match="Forgets.before_optimizer_step returned no True or False"):
        run.callbacks.before_optimizer_step(run, 2.0, 1.0)
    run.callbacks.close()


class FailsAtItsEnd(Callback):
    def close(self):
        raise ValueError("at its end")


def test_all_callbacks_are_closed_also_if_one_fails(tmp_path):
    run = tracked(tmp_path, own=[FailsAtItsEnd()])
    log_step(run)
    with pytest.raises(ValueError, match="at its end"):
        run.callbacks.close()
    assert (tmp_path / "loss.png").exists()  # the log is closed after it


def test_a_callback_ends_the_run_after_the_step_that_has_begun(tmp_path):
    run = tracked(tmp_path)
    log_step(run)
    run.stop("enough")
    assert (run.milestones.last, run.milestones.why) == (2, "ended after step 2 of 3: enough")
    run.callbacks.close()


@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.long)])
def mlflow_store(request, tmp_path, monkeypatch):
    """The module, with a store of files or with a server over SQLite."""
    mlflow = pytest.importorskip("mlflow")
    if request.param == "file":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 asks for it
        yield mlflow
        return
    pytest.importorskip("uvicorn")  # `mlflow-skinny` has no server
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", address.rpartition(":")[2], "--workers=1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/store.db", "--artifacts-destination", tmp_path]
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [*command, *map(str, store)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(lambda: is_healthy(f"{address}/health"), 200, "the server of MLflow")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield mlflow
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def test_mlflow_has_rows_settings_and_one_run_also_after_a_resume(tmp_path, mlflow_store):
    mlflow = mlflow_store
    finish(tracked(tmp_path / "run", "mlflow"))
    finish(tracked(tmp_path / "run", "mlflow", done=2))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("megatron-vlm").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED" and found.data.params["train.steps"] == "1000"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (3, 1 / 3), (3, 1 / 3)]
    assert client.get_metric_history(found.info.run_id, "valid_loss.a")[0].value == 0.9
    assert len(list(read_rows(tmp_path / "run/metrics.jsonl"))) == 4
