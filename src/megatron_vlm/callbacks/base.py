"""Hooks of a training run: metrics, validation, checkpoints, and whatever a user adds.

`train` calls callbacks and names none. `built_in` lists the package's; a user's own come from
`train(config, callbacks=[...])` or, as `file.py:Class`, from `train.callbacks`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.imports import calling, load_object
from megatron_vlm.messages import QUIET, printable, suggestion

if TYPE_CHECKING:
    from torch.nn import Module

    from megatron_vlm.batch import Batch
    from megatron_vlm.feed import Feed
    from megatron_vlm.job.step_schedule import StepSchedule
    from megatron_vlm.models.hf import Source
    from megatron_vlm.training.figures import StepFigures
    from megatron_vlm.training.losses import StepLoss


@dataclass
class Run:
    """The parts of a run, and where it is. Every rank has one."""

    config: RunConfig
    milestones: StepSchedule  # the last step, and what is due after each
    callbacks: Callbacks
    is_first_rank: bool = True
    step: int = 0  # the one that is trained, or was trained last
    micro_batches: list[Batch] = field(default_factory=list)  # of the step, on this rank
    # the micro batches of each optimizer step: one part, unless `on_step_begin` makes more
    parts: list[list[Batch]] = field(default_factory=list)
    # The ways (`stops.WAYS`) in which the run was asked to stop, when that has ended it.
    stopped_by: list[str] = field(default_factory=list)
    has_ended: bool = False  # its last step is trained
    higher_is_better: set[str] = field(default_factory=set)  # names of metrics
    notes: list[str] = field(default_factory=list)  # lines for the user about the start
    logged: dict[int, dict[str, str]] = field(default_factory=dict)  # step: the line that logs each metric

    source: Source = None
    feed: Feed = None
    model: list[Module] = field(default_factory=list)  # this rank's chunks
    optimizer: Any = None  # Megatron's, like the scheduler
    scheduler: Any = None
    step_loss: StepLoss = None
    figures: StepFigures = None

    def stop(self, reason: str) -> None:
        """End the run after this step as if it were its last; after the next if that has begun already.

        The run then validates, scores, saves and exports as at its end, and `reason` is its last line.
        """
        last = self.step + self.milestones.has_step_after(self.step)
        self.milestones = self.milestones.ending(last, reason)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row to metrics.jsonl and to trackers; of this step, unless an earlier one is given.

        Raises ConfigError with the caller's line for a value that is no number, or a name that is logged."""
        step = self.step if step is None else step
        place = "{0.f_code.co_filename}:{0.f_lineno}".format(sys._getframe(1))
        names = self.logged.get(step, {})
        for name, value in metrics.items():
            fact = f"logged in {names[name]}; give another name" if name in names else ""
            if not isinstance(value, int | float):
                fact = f"a {type(value).__name__}; give a Python number"
            if fact:  # a second value of a step would hide the first
                raise ConfigError(f"run.log in {place}: {name} of step {step} is {fact}.")
        self.logged = {step: names | dict.fromkeys(metrics, place)}
        self.callbacks.on_log(self, step, dict(metrics))

    def message(self, text: str, is_error: bool = False) -> None:
        """Print a line, above the progress bar, on the first rank; with --quiet errors and closing lines."""
        if self.is_first_rank and (QUIET not in os.environ or is_error or self.has_ended):
            tqdm.write(printable(text), file=sys.stdout)
            sys.stdout.flush()


class Callback:
    """Override what you need. All methods but `on_log` are called on every rank, and may use collectives.

    An error in one ends the run. One that waits keeps the run waiting, and a rank that takes much longer than
    `train.hang_seconds` is taken for hanging. `run.stop(why)` ends the run early.
    """

    # Whether an error in it ends the run; else it is logged once, and the callback called no more. False is
    # for callbacks without collectives: other ranks go on calling theirs.
    ends_run = True

    def before_resume(self, config: RunConfig) -> None:
        """When the run folder belongs to this run, before its newest checkpoint is looked for."""

    def on_train_begin(self, run: Run) -> None:
        """Before the first step, when weights, optimizer and data are as the checkpoint has them."""

    def on_step_begin(self, run: Run) -> None:
        """Before a step is trained; `run.micro_batches` are this rank's. It may replace `run.parts`."""

    def before_optimizer_step(self, run: Run, loss: float, grad_norm: float) -> bool:
        """Return whether the step may change the weights. Overriding it makes each step wait for its loss."""
        return True

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """After a step, with the metrics of docs/reference/metrics.md.

        Counts of tokens and samples are this step's.

        With a sharded optimizer the weights may still be on their way from other ranks.
        """

    def on_validation_end(self, run: Run, metrics: dict[str, float]) -> None:
        """After a validation or scoring, with `valid_loss`, `valid_…` of each source, or `score/…`."""

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """On the first rank: a row was written to metrics.jsonl. Numbers may be NaN or infinite."""

    def on_save(self, run: Run, checkpoint: Path) -> None:
        """When a checkpoint is complete in its folder: at the end of its step or, with `train.async_save`,
        of one of the next steps, or of the run.

        All ranks call it after the same step, but do not wait for each other: call
        `torch.distributed.barrier()` before one of them moves or removes the checkpoint.
        """

    def on_exception(self, run: Run, error: BaseException) -> None:
        """A step failed; a note may be added to the error, which is raised afterwards."""

    def on_train_end(self, run: Run) -> None:
        """After the last step, also one that `run.stop` or a signal made the last; not after an error."""

    def close(self) -> None:
        """The run ends, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON data for a checkpoint; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of the checkpoint that the run goes on from; before `on_train_begin`."""


class Callbacks(Callback):
    """Several callbacks as one, called in their order and closed in the reverse order."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = list(callbacks)
        self._begun: list[Callback] = []
        methods = [type(callback).before_optimizer_step for callback in callbacks]
        self.judge_steps = any(method is not Callback.before_optimizer_step for method in methods)

    def add_first(self, callback: Callback) -> None:
        self._callbacks.insert(0, callback)

    def before_resume(self, config: RunConfig) -> None:
        for callback in self._callbacks:
            callback.before_resume(config)

    def on_train_begin(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_train_begin(run)
            self._begun.append(callback)

    def on_step_begin(self, run: Run) -> None:
        self._call("on_step_begin", run)

    def before_optimizer_step(self, run: Run, loss: float, grad_norm: float) -> bool:
        """Return whether all let the step change the weights; all are asked."""
        answers = []
        for callback in self._callbacks:
            answer = callback.before_optimizer_step(run, loss, grad_norm)
            if answer is None:
                raise TypeError(f"{type(callback).__name__}.before_optimizer_step returned no True or False")
            answers.append(answer)
        return all(answers)

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._call("on_step_end", run, metrics)

    def on_validation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._call("on_validation_end", run, metrics)

    def on_log(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self._call("on_log", run, step, metrics)

    def on_save(self, run: Run, checkpoint: Path) -> None:
        self._call("on_save", run, checkpoint)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._call("on_exception", run, error)

    def on_train_end(self, run: Run) -> None:
        run.has_ended = True
        self._call("on_train_end", run)

    def close(self) -> None:
        """Close all that have begun, also if one fails."""
        with ExitStack() as stack:  # which closes the last first
            for callback in self._begun:
                stack.callback(_close, callback)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states by class name: a checkpoint is written beside later steps."""
        states = {name: deepcopy(callback.state_dict()) for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each its own state, if there is one."""
        for name, callback in self._named():
            if state.get(name):
                callback.load_state_dict(state[name])

    def _call(self, method: str, run: Run, *arguments: Any) -> None:
        for callback in [*self._callbacks]:
            try:
                getattr(callback, method)(run, *arguments)
            except Exception as error:
                if callback.ends_run:
                    raise
                self._callbacks.remove(callback)
                reason = f"{type(error).__name__}: {error}"
                run.message(
                    f"{type(callback).__name__} failed and is called no more: {reason}", is_error=True
                )

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """The callbacks with a name of their own, also of two of one class.

        A user's class has its module in its name: some of ours are on the first rank alone.
        """
        seen: Counter[str] = Counter()
        for callback in self._callbacks:
            kind = type(callback)
            is_ours = kind.__module__.startswith("megatron_vlm.")
            name = kind.__name__ if is_ours else f"{kind.__module__}.{kind.__name__}"
            seen[name] += 1
            yield (f"{name} {seen[name]}" if seen[name] > 1 else name), callback


def _close(callback: Callback) -> None:
    try:
        callback.close()
    except Exception:
        if callback.ends_run:
            raise


def callback_class(name: str, setting: str = "train.callbacks") -> Callable[[], Callback]:
    """Return what makes a user's callback, `FILE.py:CLASS`. Raises ConfigError that says what is wrong."""
    place = f"{setting}: {name}"
    loaded = load_object(place, name)
    if not (isinstance(loaded, type) and issubclass(loaded, Callback)):
        raise ConfigError(f"{place} is no subclass of Callback; see docs/how-to/extend.md.")
    check_methods(place, loaded)

    def made() -> Callback:
        with calling(place, name):
            return loaded()

    return made


def check_methods(place: str, kind: type[Callback]) -> None:
    """Raise ConfigError, beginning with `place`, for a method that the run would not call, or could not."""
    hooks = [method for method in vars(Callback) if method.startswith(("on_", "before_"))]
    for method in dir(kind):
        if method.startswith("on_") and method not in hooks:
            raise ConfigError(f"{place}: {method} is never called{suggestion(method, hooks)}")
    # a method with other parameters would fail only when a step calls it
    for method, ours in vars(Callback).items():
        users = inspect.getattr_static(kind, method)
        if inspect.isfunction(ours) and inspect.isfunction(users):
            expected = inspect.signature(ours)
            try:
                inspect.signature(users).bind(*expected.parameters)
            except TypeError:
                names = ", ".join(expected.parameters)
                line = f"{users.__code__.co_filename}:{users.__code__.co_firstlineno}"
                raise ConfigError(f"{place}: {method} ({line}) cannot take ({names}); correct it.") from None
