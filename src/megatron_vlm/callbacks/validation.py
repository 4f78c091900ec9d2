"""Validation (`train.eval_every`), the best checkpoint (`train.best_by`) and early stopping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from megatron_vlm.callbacks import Callback
from megatron_vlm.config import ConfigError, TrainConfig
from megatron_vlm.messages import listed

if TYPE_CHECKING:
    from megatron_vlm.callbacks import Run

# beginnings of names of metrics
SCORE = "score/"
VALID = "valid_"  # of a validation


class Best(Callback):
    """The best value so far, its step, and how many ratings after it were none better.

    Equal values are not better. Values of another `best_by`, which a checkpoint may have, do not count.
    """

    def __init__(self, train: TrainConfig):
        self._train = train
        self.saved = {"by": train.best_by, "rated": None, "step": 0, "since": 0}
        self._last: dict[str, Any] = {"last_step": None, "last": None}  # the step that was rated last

    def state_dict(self) -> dict[str, Any]:
        """Return also the last rated step and its value: `run_folder` compares checkpoints by it."""
        return self.saved | self._last

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["by"] == self._train.best_by:
            self.saved = {name: state[name] for name in self.saved}

    def on_train_begin(self, run: Run) -> None:
        if self.is_over and run.step < run.milestones.steps:
            run.milestones = run.milestones.ending(run.step, self.why_over())
            run.message("train.patience: none of the steps is left; to go on, raise train.patience")

    def on_validation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.rate(run.step, metrics, run.higher_is_better)
        if self.is_over:
            run.stop(self.why_over())

    @property
    def is_over(self) -> bool:
        """Whether `train.patience` is at its end."""
        return 0 < self._train.patience <= self.saved["since"]

    def rate(self, step: int, logged: Mapping[str, float], higher: Collection[str] = ()) -> float | None:
        """Return `best_by` of what was logged, negated if more is better; None if it was not due.

        Of the scores in `higher`, more is better. Raises ConfigError if metrics of its kind were logged, and
        it is none of them.
        """
        name, more_is_better = self._train.best_figure
        alike = [
            logged_name
            for logged_name in logged
            if logged_name.startswith(SCORE if self._train.best_is_score else VALID)
        ]
        if not alike:
            return None
        if name not in alike:
            raise ConfigError(
                f"train.best_by: {name} is no figure that there is; there are {listed(alike, 8)}."
            )
        # compared negated where more is better, so that less is always better here
        if more_is_better is None:
            more_is_better = name in higher
        rated = -logged[name] if more_is_better else logged[name]
        best = inf if self.saved["rated"] is None else self.saved["rated"]
        if isfinite(rated) and rated < best:
            self.saved |= {"rated": rated, "step": step, "since": 0}
        else:
            self.saved["since"] += 1
        self._last = {"last_step": step, "last": rated}
        return rated

    def why_over(self) -> str:
        """Why a run ended when `train.patience` was at its end."""
        name, _ = self._train.best_figure
        best = f"was best after step {self.saved['step']}" if self.saved["step"] else "was never finite"
        times = self.saved["since"]
        return f"{name} {best}, and no better in the {times} times since (train.patience)"


class Validation(Callback):
    """Validates after the steps that ask for it, and tells the other callbacks."""

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if not run.milestones.evaluates_after(run.step):
            return
        # here, as pages of runs use `Best` and need no torch
        from megatron_vlm.training.evaluate import validation_loss

        sources = run.feed.valid_sources
        batches = run.feed.valid(run.step)
        loss, by_source = validation_loss(run.config, run.model, run.step_loss, batches, sources)
        if loss is None:  # there is no validation data
            return
        figures = {f"valid_{name}": number for name, number in by_source.items()}
        run.callbacks.on_validation_end(run, {"valid_loss": loss, **figures})
