"""Runs without a model: what callbacks get is given by hand."""

from pathlib import Path
from typing import Any

from megatron_vlm.callbacks import Callback, Callbacks, Run
from megatron_vlm.callbacks.run_log import RunLog
from megatron_vlm.callbacks.trackers import trackers_of
from megatron_vlm.config import RunConfig
from megatron_vlm.job.step_schedule import StepSchedule


class DropsOf:
    """A feed that has read nothing and dropped one sample a step."""

    reads = False

    def __init__(self) -> None:
        self.dropped = 0

    def dropped_everywhere(self) -> int:
        return self.dropped

    def dropped_by_reason(self) -> dict[str, int]:
        return {}


def begun_run(
    config: RunConfig,
    steps: int,
    *own: Callback,
    done: int = 0,
    state: dict[str, Any] | None = None,
    is_first_rank: bool = True,
) -> Run:
    """A run of so many steps, of which `done` are trained, with its log, its trackers and `own` callbacks.

    `state` is what a checkpoint has of the log."""
    trackers = trackers_of(config) if is_first_rank else []
    callbacks = Callbacks([RunLog(config), *trackers, *own])
    callbacks.load_state_dict({"RunLog": state})
    run = Run(config, StepSchedule(config.train, steps), callbacks, is_first_rank, step=done, feed=DropsOf())
    callbacks.on_train_begin(run)
    return run


def log_step(run: Run, loss: float = 1.0, dropped: int = 0, **metrics: float) -> None:
    """The next step, with metrics of which the rest is the same in each."""
    run.step += 1
    run.feed.dropped = dropped
    usual = {"lr": 0.1, "grad_norm": 2.0, "seconds": 0.5, "trained_tokens": 10}
    run.callbacks.on_step_end(run, {"loss": loss, **usual, **metrics})


def validate(run: Run, loss: float, **metrics: float) -> None:
    run.callbacks.on_validation_end(run, {"valid_loss": loss, **metrics})


def saved(run: Run) -> None:
    run.callbacks.on_save(run, Path(run.config.run_dir, "checkpoints", f"step_{run.step:08d}"))
