"""The story of one run: from a Hugging Face checkpoint and a dataset to a trained model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.nn import Module

from megatron_vlm.config import RunConfig
from megatron_vlm.extras.evaluate.in_training import Evaluations
from megatron_vlm.extras.report.live import open_log
from megatron_vlm.extras.stores.uploads import Uploads, restore
from megatron_vlm.feed import Feed
from megatron_vlm.job import stops, watchdog
from megatron_vlm.job.best import Best
from megatron_vlm.job.errors import closing
from megatron_vlm.models.adapters.files import notes_of_start
from megatron_vlm.models.hf import Source, open_source
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.weights.by_part import parameters_by_part
from megatron_vlm.objectives import objective_of
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder.adapter_start import begun
from megatron_vlm.run_folder.batch_log import how_to_look, keys_of, named, naming_samples
from megatron_vlm.run_folder.callbacks import Callback
from megatron_vlm.run_folder.run_log import RunLogger
from megatron_vlm.training import checkpoint
from megatron_vlm.training.exports import Exports
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.gradients import data_parallel
from megatron_vlm.training.losses.tokens import StepLoss
from megatron_vlm.training.optimizer import build_optimizer, learning_rates
from megatron_vlm.training.profile import profiling
from megatron_vlm.training.step import train_step


def train(config: RunConfig, profile_steps: int = 0, callbacks: Sequence[Callback] = ()) -> None:
    """Train to the last of `config.train.steps` or `epochs`, from the run folder's latest checkpoint if any.

    Every process of the layout calls it. The run folder then holds checkpoints, metrics and pictures, and
    with `profile_steps` a trace of so many steps (see `training.profile`). Raises `stops.Stopped` on every
    rank if any was asked to end early; its checkpoint is then there. `callbacks` hear on every rank.
    """
    setup.init_distributed(config.parallel, config.train.seed, config.train.deterministic)
    lock = checkpoint.claim(config.run_dir, config.model.hf_path)
    restored = setup.on_first_rank(restore, config)
    saved = checkpoint.saved(config.run_dir)
    threads_note = setup.resume_threads(saved.threads)
    asked_for = config
    config = setup.on_first_rank(begun, asked_for)  # a resumed run keeps the adapter that it began with
    source = open_source(config.model.hf_path, saved.tied, config.data)
    feed = Feed(config, source, saved)
    model = starting_model(config, source)
    step_loss = objective_of(config).step_loss(config, model)
    description = source.description
    parts = parameters_by_part(model, config.optimizer.by_part, description.groups, description.rules)
    optimizer, scheduler = build_optimizer(model, config, feed.milestones.steps, parts)
    best = Best(config.train, saved.extra.get("best"))
    feed.milestones = feed.milestones.heeding(best, saved.step)
    with checkpoint.naming_changes(config):
        resumed = checkpoint.load_latest(config.run_dir, model, optimizer, scheduler)
    feed.resume(resumed)
    figures = StepFigures(config, description, model, feed.sources, saved.extra.get("spikes"))
    first = saved.step + 1
    watchdog.beat("opening the log and its trackers")
    log = open_log(asked_for, feed.milestones.steps, first, setup.is_first_rank(), saved.extra, callbacks)
    evaluations = Evaluations(config, source, model, step_loss, best)
    notes = filter(None, [restored.note, threads_note])
    for message in chain(notes_of_start(config), feed.notes(), evaluations.notes(), notes):
        log.message(message)
    writer = checkpoint.CheckpointWriter(config, model, optimizer, scheduler)
    exports = Exports(config, source, model, log)
    uploads = Uploads(config, restored.token, log.is_writer, log.message)
    log.callbacks.append(uploads)
    run = Run(config, feed, model, optimizer, scheduler, step_loss, figures, evaluations, log, writer)
    profiler = profiling(config.run_dir, profile_steps, first, model, log.message)
    with closing(writer, exports, log, feed), stops.heeding(config.train.stop_after), profiler as profiled:
        exports.after(saved.step, feed.milestones, replace=False)  # an export that a kill interrupted
        if saved.path:
            uploads.on_save(saved.step, saved.path)
        run.train_from(first, exports, profiled)
        writer.announce(log.saved)
        run.sum_up()
        stop, steps = feed.milestones.stop, feed.milestones.steps
        asked_to_stop = figures.asked_to_stop if stop else exports.wait()
        uploads.wait()
        watchdog.beat("leaving the other ranks")
    lock.close()
    setup.shutdown()
    if stop or asked_to_stop:
        raise stops.Stopped(stop or steps, steps, " and ".join(asked_to_stop))


def starting_model(config: RunConfig, source: Source) -> list[Module]:
    """This rank's chunks, with the source's weights unless a checkpoint provides all that the run needs."""
    # an objective that compares with the starting weights needs them also when the run resumes
    saved = checkpoint.saved(config.run_dir)
    resumes = saved.path is not None and not objective_of(config).reference_passes
    chunks = open_model(config, source, resumes, run_dir=config.run_dir)
    return data_parallel(chunks, config)


@dataclass(frozen=True)
class Run:
    """A run on one rank, when all is there that its steps need."""

    config: RunConfig
    feed: Feed
    model: list[Module]
    optimizer: Any  # Megatron's, like the scheduler
    scheduler: Any
    step_loss: StepLoss
    figures: StepFigures
    evaluations: Evaluations
    log: RunLogger
    writer: checkpoint.CheckpointWriter

    def train_from(self, first: int, exports: Exports, profiled: Callable[[], None]) -> None:
        """Train from step `first` to the last; validate, save and export after the steps that ask for it."""
        for step in range(first, self.feed.milestones.steps + 1):
            self.train(step)
            profiled()
            rated = self.evaluations.after(step, self.feed, self.log)
            if self.feed.milestones.saves_after(step):
                self.save(step, rated)
            exports.after(step, self.feed.milestones)
            if not self.config.train.async_save:
                self.writer.announce(self.log.saved)
            if self.feed.milestones.ends_after(step):
                break

    def train(self, step: int) -> None:
        """One optimizer step with the next global batch."""
        self.writer.check()
        self.figures.is_saving = self.writer.is_writing
        began = time.monotonic()
        rates = learning_rates(self.scheduler)
        micro_batches = self.feed.train(step)
        waited = time.monotonic() - began
        watchdog.beat(f"training step {step}")
        with naming_samples(self.config.run_dir, step, micro_batches):
            loss, tokens, grad_norm = train_step(
                self.model,
                self.optimizer,
                self.scheduler,
                micro_batches,
                step_loss=self.step_loss,
                figures=self.figures,
                goes_on=self.feed.milestones.goes_on_after(step),
            )
        watchdog.beat(step=step)
        if spike := self.figures.spikes.why:
            keys = dict.fromkeys(chain(*setup.from_all_ranks(keys_of(micro_batches))))
            self.log.message(f"step {step}: {spike}; {named(keys)}; {how_to_look(self.config.run_dir, step)}")
        seconds = time.monotonic() - began
        self.log.log_step(
            step,
            loss=loss,
            lr=rates.pop("lr"),
            grad_norm=grad_norm,
            trained_tokens=tokens,
            seconds=seconds,
            dropped=self.feed.dropped_everywhere(),
            figures=self.figures.of_step(seconds, waited) | self.feed.epoch_after(step) | rates,
        )
        if not self.figures.any_rank_saves:
            self.writer.announce(self.log.saved)
        if self.figures.asked_to_stop:
            self.feed.milestones = self.feed.milestones.stopping_soon(step)

    def save(self, step: int, rated: float | None) -> None:
        """Write a checkpoint of a step, and the pictures of the run so far."""
        self.writer.announce(self.log.saved)  # of the checkpoint before, if it took until now
        extra = {**self.log.totals, "rows": self.feed.rows_after(step), "rated": rated}
        extra |= {"best": self.evaluations.best.saved, "spikes": self.figures.spikes.saved}
        extra |= {"dropped": self.feed.dropped_by_reason()}
        self.writer.save(step, self.feed.state(), extra)
        self.log.save()

    def sum_up(self) -> None:
        """The last lines of a run: what it dropped, and why it ended early."""
        if dropped := self.feed.dropped_by_reason():
            self.log.message(f"dropped samples: {dropped}; which and why: {self.config.run_dir}/drops")
        if self.feed.milestones.why:
            self.log.message(self.feed.milestones.why)
