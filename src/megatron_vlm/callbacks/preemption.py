"""Heartbeats for the watchdog, and an early end when a scheduler or `train.stop_after` asks for it."""

from contextlib import ExitStack

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.job import stops, watchdog


class Heartbeat(Callback):
    """Tells the watchdog that steps go on."""

    def on_step_begin(self, run: Run) -> None:
        watchdog.beat(f"training step {run.step}")

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        watchdog.beat(step=run.step)

    def on_train_end(self, run: Run) -> None:
        watchdog.beat("leaving the other ranks")


class Preemption(Callback):
    """Saves and ends the run when a signal came (`job.stops`).

    All ranks stop after the same step, whichever got it: a flag is summed with the metrics of each step.
    """

    def __init__(self, stop_after: str | None):
        self._stop_after = stop_after
        self._signals = ExitStack()

    def on_train_begin(self, run: Run) -> None:
        self._signals.enter_context(stops.note_sigterm(self._stop_after))

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.figures.asked_to_stop:
            run.milestones = run.milestones.stopping_soon(run.step)

    def on_train_end(self, run: Run) -> None:
        if run.milestones.stop:
            run.stopped_by = run.figures.asked_to_stop

    def close(self) -> None:
        self._signals.close()
