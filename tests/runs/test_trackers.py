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
from slurm import wait_for

from megatron_vlm.commands.arguments import check_run_folder
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import read_rows
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.run_folder.callbacks import Callback
from megatron_vlm.run_folder.run_log import RunLogger
from megatron_vlm.run_folder.trackers import check_tracker

OWN = """
class Mine:
    def __init__(self, config, first_step):
        self.file = open(config.run_dir + "/mine.txt", "w")
        self.file.write(f"from {first_step}\\n")
    def log(self, step, numbers):
        self.file.write(f"{step} {numbers.get('loss', numbers.get('valid_loss'))}\\n")
    def save(self):
        self.file.flush()
    def close(self):
        self.file.close()

class Fails(Mine):
    def log(self, step, numbers):
        raise TimeoutError("no server")

class Lacks:
    def log(self, step, numbers): ...
"""


def logger(folder, *trackers, first=1, **more) -> RunLogger:
    settings = {"run_dir": str(folder), "logging.tensorboard": False, "logging.trackers": [*trackers]}
    return RunLogger(folder, apply_overrides(RunConfig(), settings), 3, first, **more)


def run(log: RunLogger, first=1) -> None:
    for step in range(first, 4):
        log.log_step(step, math.nan if step == 2 else 1 / step, 0.1, 2.0, 10, 0.5)
        if step == 2:
            log.log_eval(2, 0.7, {"loss/a": 0.9})
            log.saved(2)
            log.save()
    log.close()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_class_of_a_users_file_gets_each_row(own, tmp_path):
    run(logger(tmp_path / "run", f"{own}:Mine"))
    assert (tmp_path / "run/mine.txt").read_text() == "from 1\n1 1.0\n2 nan\n2 0.7\n3 0.3333333333333333\n"


def test_one_that_fails_is_told_of_once_and_ends_nothing(own, tmp_path, capsys):
    run(logger(tmp_path / "run", f"{own}:Fails", f"{own}:Mine"))
    said = capsys.readouterr().out
    assert said.count("tracker Fails failed and gets no more rows; ") == 1
    assert "TimeoutError: no server" in said
    assert "3 0.3333" in (tmp_path / "run/mine.txt").read_text()


def test_csv_has_all_rows_and_columns_also_after_a_resume(tmp_path):
    run(logger(tmp_path, "csv"))
    run(logger(tmp_path, "csv", first=3), first=3)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["valid_loss"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "", ""),
        ("2", "", "0.7"),
        ("3", "0.3333333333333333", ""),
    ]


@pytest.mark.parametrize("name", ["mlflo", "none.py:Mine", "own.py", ":Mine"])
def test_what_is_no_tracker_is_refused_before_the_start(name):
    with pytest.raises(ConfigError, match="logging.trackers: .*(give csv or mlflow, or FILE|does not exist)"):
        check_tracker(name)


def test_a_class_without_the_methods_is_refused(own, tmp_path):
    with pytest.raises(ConfigError, match="Lacks has no save, close; write them"):
        logger(tmp_path / "run", f"{own}:Lacks")


def test_a_class_that_is_not_there_is_refused_before_the_start(own, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    settings = {"run_dir": str(tmp_path / "run"), "logging.trackers": [f"{own}:Theirs"]}
    with pytest.raises(ConfigError, match="the file has no class Theirs; give the name of one"):
        check_run_folder(apply_overrides(RunConfig(), settings))


def test_one_that_cannot_be_made_is_told_as_the_users(own, tmp_path):
    own.write_text("class Odd:\n    log = save = close = print\n")
    with pytest.raises(
        ConfigError, match="logging.trackers: .*own.py:Odd: TypeError: .*; correct the file.$"
    ):
        logger(tmp_path / "run", f"{own}:Odd")


class Notes(Callback):
    def __init__(self):
        self.heard = []

    def on_step(self, step, figures):
        self.heard.append(("step", step, figures["lr"]))

    def on_validation(self, step, loss, figures):
        self.heard.append(("validation", step, loss, dict(figures)))

    def on_save(self, step, checkpoint):
        self.heard.append(("save", step, checkpoint.name))

    def on_end(self, step):
        self.heard.append(("end", step))


@pytest.mark.parametrize("is_writer", [True, False])
def test_callbacks_hear_of_steps_validation_saves_and_the_end_on_every_rank(tmp_path, is_writer):
    notes = Notes()
    run(logger(tmp_path, callbacks=[notes], is_writer=is_writer))
    assert notes.heard == [
        ("step", 1, 0.1),
        ("step", 2, 0.1),
        ("validation", 2, 0.7, {"valid_loss/a": 0.9}),
        ("save", 2, "step_00000002"),
        ("step", 3, 0.1),
        ("end", 3),
    ]


def test_an_end_by_an_error_is_not_the_end(tmp_path):
    notes = Notes()
    log = logger(tmp_path, callbacks=[notes])
    log.log_step(3, 1.0, 0.1, 2.0, 10, 0.5)
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        finally:
            log.close()
    assert notes.heard == [("step", 3, 0.1)]


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
    run(logger(tmp_path / "run", "mlflow"))
    run(logger(tmp_path / "run", "mlflow", first=3), first=3)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("megatron-vlm").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED" and found.data.params["train.steps"] == "1000"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (3, 1 / 3), (3, 1 / 3)]
    assert client.get_metric_history(found.info.run_id, "valid_loss.a")[0].value == 0.9
    assert len(list(read_rows(tmp_path / "run/metrics.jsonl"))) == 4
