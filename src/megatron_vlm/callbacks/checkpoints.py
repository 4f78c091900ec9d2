"""Writes the checkpoints of a run (`train.save_every`), and tells the other callbacks when one is there."""

from __future__ import annotations

import atexit
import gc
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.config import RunConfig
from megatron_vlm.job import watchdog
from megatron_vlm.parallel.setup import device, group_beside, use_device
from megatron_vlm.run_folder import checkpoints
from megatron_vlm.training.checkpoint import begin_save
from megatron_vlm.training.tensor_files import PinnedSnapshot


class Checkpoints(Callback):
    """Saves after the steps that ask for it; with `train.async_save`, beside the steps that follow."""

    def on_train_begin(self, run: Run) -> None:
        self.writer = CheckpointWriter(run.config, run.model, run.optimizer, run.scheduler)

    def on_step_begin(self, run: Run) -> None:
        self.writer.check()
        run.figures.is_saving = self.writer.is_writing

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.config.train.async_save and not run.figures.any_rank_saves:
            self.announce(run)
        if run.milestones.saves_after(run.step):
            self.announce(run)  # the checkpoint before, if it took until now
            extra = {**run.feed.progress(run.step), "callbacks": run.callbacks.state_dict()}
            self.writer.save(run.step, run.feed.state(), extra)

    def on_train_end(self, run: Run) -> None:
        self.announce(run)

    def close(self) -> None:
        self.writer.close()

    def announce(self, run: Run) -> None:
        """Call `on_save` for the checkpoint that was saved last, once, when it is complete."""
        step = self.writer.complete_step()
        if step is not None:
            run.callbacks.on_save(run, checkpoints(run.config.run_dir) / f"step_{step:08d}")


class SaveNotices(Callback):
    """Calls `on_save` at the end of the step that was saved, unless checkpoints are written beside steps."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if not run.config.train.async_save:
            self._checkpoints.announce(run)


class CheckpointWriter:
    """Writes a run's checkpoints; with `train.async_save` on a thread, while training goes on. Every rank
    creates one, and all call its methods together.

    One is written at a time. What fails on the thread is raised by the next call of any method.
    """

    def __init__(self, config: RunConfig, model_chunks: list, optimizer, scheduler):
        beside = config.train.async_save
        self._config = config
        self._run = (model_chunks, optimizer, scheduler)
        self._copies = PinnedSnapshot()
        gc.collect()
        atexit.register(gc.unfreeze)  # triton's library reports at length what is alive at the very end
        gc.freeze()  # Megatron collects garbage in every save: half a second without what is there now
        self._group = group_beside() if beside else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", use_device, (device(),)) if beside else None
        self._writing: Future[Path] | None = None
        self._unannounced: int | None = None  # the step that was saved last, until `complete_step`
        self._doing = ""

    def save(self, step: int, loader_state: Any, extra: dict[str, Any]) -> None:
        """Save as `begin_save` says. When this returns, tensors may change; after `wait`, all is on disk."""
        self.wait()
        run_dir, train = self._config.run_dir, self._config.train
        self._doing = f"saving step {step} in {run_dir}"
        write = begin_save(
            self._copies,
            run_dir,
            step,
            *self._run,
            loader_state=loader_state,
            keep=train.keep_checkpoints,
            extra=extra,
            keep_best=train.keep_best,
        )
        if self._thread is None:
            write(None)
        else:
            self._writing = self._thread.submit(write, self._group)
        self._unannounced = step

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread still writes."""
        return self._writing is not None and not self._writing.done()

    def complete_step(self) -> int | None:
        """Wait for the checkpoint that was saved last; return its step the first time, then None."""
        self.wait()
        step = self._unannounced
        self._unannounced = None
        return step

    def check(self) -> None:
        """Raises what has failed on the thread so far; it waits for nothing."""
        if self._writing and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all that was saved is on disk."""
        if self._writing:
            watchdog.beat(self._doing)
            writing = self._writing
            self._writing = None
            writing.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread:
                self._thread.shutdown()
