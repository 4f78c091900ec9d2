"""Where rows of metrics.jsonl go besides: TensorBoard, Weights & Biases, MLflow, CSV."""

import csv
import io
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_vlm.callbacks import Callback, Run, callback_class
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import RunConfig
from megatron_vlm.files import atomic_write, read_text
from megatron_vlm.imports import optional_package
from megatron_vlm.overrides import flatten, load_yaml, to_yaml


class Tracker(Callback):
    """Gets each logged row on the first rank. One that fails in the middle of a run does not end it:
    metrics.jsonl has every row."""

    ends_run = False


class TensorBoard(Tracker):
    """Events in `<run_dir>/tensorboard`."""

    def on_train_begin(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(run.config.run_dir, "tensorboard")
        self._events = SummaryWriter(str(folder), purge_step=run.step + 1)

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def on_save(self, run: Run, checkpoint: Path) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases(Tracker):
    """A run of the project `logging.wandb_project`."""

    def on_train_begin(self, run: Run) -> None:
        config = run.config
        self._run = optional_package("wandb", "logging.wandb_project").init(
            project=config.logging.wandb_project,
            name=config.name,
            dir=config.run_dir,
            config=load_yaml(to_yaml(config)),
            id=os.environ.get("WANDB_RUN_ID"),
            resume="allow",
        )
        self._newest = 0

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self._newest = max(self._newest, step)  # it drops what comes for an earlier step
        self._run.log(metrics, step=self._newest)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME; its id is kept in
    `<run_dir>/mlflow_run`, so that a resumed run goes on in it."""

    def on_train_begin(self, run: Run) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody that it runs
        config = run.config
        mlflow = optional_package("mlflow", "logging.trackers: mlflow")
        self._client = mlflow.MlflowClient()
        file = Path(config.run_dir) / "mlflow_run"
        if file.exists():
            self._run = read_text(file).strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron-vlm")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=config.name).info.run_id
        settings = flatten(load_yaml(to_yaml(config)))
        params = [mlflow.entities.Param(key, str(value)[:6000]) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # the most of one call
            self._client.log_batch(self._run, params=params[start : start + 100])
        atomic_write(file, self._run + "\n")

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # a store of files cannot hold both valid_loss and valid_loss/a
        metric_rows = [Metric(name.replace("/", "."), value, now, step) for name, value in finite.items()]
        self._client.log_batch(self._run, metric_rows)

    def close(self) -> None:
        self._client.set_terminated(self._run, "FAILED" if sys.exception() else "FINISHED")


class CSV(Tracker):
    """`<run_dir>/metrics.csv`, written again from metrics.jsonl at each checkpoint and at the end."""

    def on_train_begin(self, run: Run) -> None:
        self._folder = Path(run.config.run_dir)

    def on_save(self, run: Run, checkpoint: Path) -> None:
        self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        rows = list(read_rows(self._folder / "metrics.jsonl"))
        names = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        atomic_write(self._folder / "metrics.csv", text.getvalue())


NAMED: dict[str, type[Tracker]] = {"csv": CSV, "mlflow": MLflow}


def trackers_of(config: RunConfig) -> list[Callback]:
    """The trackers that the configuration asks for."""
    trackers: list[Callback] = []
    if config.logging.tensorboard:
        trackers.append(TensorBoard())
    if config.logging.wandb_project:
        trackers.append(WeightsAndBiases())
    return [*trackers, *(_named(name)() for name in config.logging.trackers)]


def _named(name: str) -> Callable[[], Callback]:
    return NAMED.get(name) or callback_class(name, "logging.trackers")
