"""Where rows of metrics.jsonl go besides: TensorBoard, Weights & Biases, MLflow, CSV, a user's own class."""

import csv
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import calling, object_of, optional_package, read_rows, read_text, write_whole
from megatron_vlm.messages import printable
from megatron_vlm.overrides import flatten, load_yaml, to_yaml


class Tracker:
    """Gets each logged row on the one rank that writes. It is made with the configuration and the first step
    that will be logged: later rows of an interrupted run are logged again."""

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """A row of metrics.jsonl; numbers may be NaN or infinite."""

    def save(self) -> None:
        """A checkpoint was written, or the run ends: what was logged should last."""

    def close(self) -> None:
        """The run ends, also after an error."""


class TensorBoard(Tracker):
    """Events in `<run_dir>/tensorboard`."""

    def __init__(self, config: RunConfig, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(Path(config.run_dir) / "tensorboard"), purge_step=first_step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)

    def save(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases(Tracker):
    """A run of the project `logging.wandb_project`."""

    def __init__(self, config: RunConfig, first_step: int):
        self._run = optional_package("wandb", "logging.wandb_project").init(
            project=config.logging.wandb_project,
            name=config.name,
            dir=config.run_dir,
            config=load_yaml(to_yaml(config)),
            id=os.environ.get("WANDB_RUN_ID"),
            resume="allow",
        )
        self._newest = 0

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._newest = max(self._newest, step)  # it drops what comes for an earlier step
        self._run.log(numbers, step=self._newest)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME; its id is kept in
    `<run_dir>/mlflow_run`, so that a resumed run goes on in it."""

    def __init__(self, config: RunConfig, first_step: int):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody that it runs
        mlflow = optional_package("mlflow", "logging.trackers: mlflow")
        self._client = mlflow.MlflowClient()
        file = Path(config.run_dir) / "mlflow_run"
        if file.exists():
            self._run = read_text(file).strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron-vlm")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=config.name).info.run_id
        settings = flatten(load_yaml(to_yaml(config)))
        params = [mlflow.entities.Param(key, str(value)[:6000]) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # the most of one call
            self._client.log_batch(self._run, params=params[start : start + 100])
        write_whole(file, self._run + "\n")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        # a store of files cannot hold both valid_loss and valid_loss/a
        named = [Metric(name.replace("/", "."), value, now, step) for name, value in finite.items()]
        self._client.log_batch(self._run, named)

    def close(self) -> None:
        self._client.set_terminated(self._run, "FAILED" if sys.exception() else "FINISHED")


class CSV(Tracker):
    """`<run_dir>/metrics.csv`, written again from metrics.jsonl at each checkpoint and at the end."""

    def __init__(self, config: RunConfig, first_step: int):
        self._folder = Path(config.run_dir)

    def save(self) -> None:
        rows = list(read_rows(self._folder / "metrics.jsonl"))
        names = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._folder / "metrics.csv", text.getvalue())

    def close(self) -> None:
        self.save()


NAMED: dict[str, type[Tracker]] = {"csv": CSV, "mlflow": MLflow}
METHODS = ("log", "save", "close")


def trackers_of(config: RunConfig) -> Iterator[Callable[[RunConfig, int], Tracker]]:
    """The classes of the trackers that the configuration asks for. Raises ConfigError as `tracker_class`."""
    if config.logging.tensorboard:
        yield TensorBoard
    if config.logging.wandb_project:
        yield WeightsAndBiases
    for name in config.logging.trackers:
        yield tracker_class(name)


def tracker_class(name: str) -> Callable[[RunConfig, int], Tracker]:
    """Makes the tracker of a name of NAMED, or of `file.py:Class`, whose file is run. Raises ConfigError that
    says what is wrong with it."""
    check_tracker(name)
    if name in NAMED:
        return NAMED[name]
    path, _, class_name = name.rpartition(":")
    place = f"logging.trackers: {printable(name)}"
    found = object_of(place, Path(path), class_name)
    if found is None:
        raise ConfigError(f"{place}: the file has no class {class_name}; give the name of one that it has.")
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"{place} has no {', '.join(missing)}; write them as docs/reports.md shows.")

    def made(config: RunConfig, first_step: int) -> Tracker:
        with calling(place, Path(path)):
            return found(config, first_step)

    return made


def check_tracker(name: str) -> None:
    """Raises ConfigError unless this is a name of NAMED, or `file.py:Class` with a file that is there."""
    path, _, class_name = name.rpartition(":")
    if name in NAMED or (path.endswith(".py") and class_name.isidentifier() and Path(path).is_file()):
        return
    if path.endswith(".py") and class_name.isidentifier():
        raise ConfigError(
            f"logging.trackers: {printable(path)} does not exist; give the path of a Python file."
        )
    raise ConfigError(
        f"logging.trackers: {printable(name)} is no tracker; give {' or '.join(NAMED)}, or FILE.py:CLASS."
    )


class Trackers:
    """Several trackers as one. One that fails in the middle of a run is told of once and called no more: the
    run does not depend on it, and metrics.jsonl has every row."""

    def __init__(self, trackers: list[Tracker], message: Callable[[str], None]):
        self._trackers = trackers
        self._message = message

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._each("log", step, numbers)

    def save(self) -> None:
        self._each("save")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for tracker in [*self._trackers]:
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever a server or a user's class raises
                self._trackers.remove(tracker)
                who = type(tracker).__name__
                self._message(
                    f"tracker {who} failed and gets no more rows; metrics.jsonl has them all: "
                    f"{printable(f'{type(error).__name__}: {error}')}"
                )
