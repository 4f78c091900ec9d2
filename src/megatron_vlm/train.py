"""The story of one run: from a Hugging Face checkpoint and a dataset to a trained model."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch.nn import Module

from megatron_vlm import exports
from megatron_vlm.config import RunConfig
from megatron_vlm.feed import Feed
from megatron_vlm.job import watchdog
from megatron_vlm.job.failures import closing
from megatron_vlm.models.adapters import words_of_start
from megatron_vlm.models.hf import Source, open_source
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.weights import parameters_by_part
from megatron_vlm.parallel import setup
from megatron_vlm.rl.preferences import objective_of
from megatron_vlm.run_folder.adapter_start import begun
from megatron_vlm.run_folder.run_log import RunLogger
from megatron_vlm.training import checkpoint
from megatron_vlm.training.evaluate import validation_loss
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.gradients import data_parallel
from megatron_vlm.training.optimizer import build_optimizer, learning_rates
from megatron_vlm.training.profile import Profile
from megatron_vlm.training.step import train_step


def train(config: RunConfig, profile_steps: int = 0) -> None:
    """Train to the last of `config.train.steps` or `epochs`, from the run folder's latest checkpoint if any.

    Every process of the layout calls it. The run folder then holds checkpoints, metrics and pictures, and
    with `profile_steps` a trace of so many steps (see `training.profile`).
    """
    setup.init_distributed(config.parallel, config.train.seed)
    lock = checkpoint.claim(config.run_dir, config.model.hf_path)
    saved = checkpoint.saved(config.run_dir)
    given, config = config, setup.on_first_rank(begun, config)
    source = open_source(config.model.hf_path, saved.tied)
    watchdog.beat("opening the data")
    feed = Feed(config, source, saved)
    milestones = feed.milestones
    model = starting_model(config, source)
    step_loss, logged = objective_of(config, model)
    described = source.description
    own = parameters_by_part(model, config.optimizer.by_part, described.groups, described.rules)
    optimizer, scheduler = build_optimizer(model, config, milestones.steps, own)
    watchdog.beat(f"loading the last checkpoint of {config.run_dir}", files=True)
    resumed = checkpoint.load_latest(config.run_dir, model, optimizer, scheduler)
    figures = StepFigures(config, described, model, feed.sources, logged)
    watchdog.beat("finding the place in the data")
    feed.resume(resumed)
    first = saved.step + 1
    log = RunLogger(config.run_dir, given, milestones.steps, first, setup.is_first_rank(), saved.extra)
    for message in opening_words(config, source, feed, resumed):
        log.message(message)
    with closing(log, feed), Profile(config.run_dir, profile_steps, first, model, log.message) as profile:
        if saved.step and milestones.exports_after(saved.step):  # a kill may have come before it was whole
            exports.export_step(config, source, model, saved.step, replace=False)
        for step in range(first, milestones.steps + 1):
            began, rates = time.monotonic(), learning_rates(scheduler)
            watchdog.beat(f"waiting for the data of step {step}")
            micro_batches = feed.train(step)
            waited = time.monotonic() - began
            watchdog.beat(f"training step {step}")
            with feed.naming_samples(step, micro_batches):
                given = micro_batches, figures, milestones.goes_on_after(step), step_loss
                loss, tokens, grad_norm = train_step(model, optimizer, scheduler, *given)
            watchdog.beat(step=step)
            seconds = time.monotonic() - began
            numbers = (loss, rates.pop("lr"), grad_norm, tokens, seconds, feed.dropped_everywhere())
            log.log_step(step, *numbers, figures.of_step(seconds, waited) | feed.epoch_after(step) | rates)
            profile.step()
            extra = {**log.totals, "rows": feed.rows_after(step)}
            if milestones.evaluates_after(step):
                watchdog.beat(f"evaluating after step {step}")
                given = feed.valid(), config.train.eval_steps, feed.valid_sources, step_loss, logged
                extra["valid_loss"], by_source = validation_loss(model, *given)
                log.log_eval(step, extra["valid_loss"], by_source)
            if milestones.saves_after(step):
                extra["dropped"] = feed.dropped_by_reason()
                watchdog.beat(f"saving step {step} in {config.run_dir}", files=True)
                kept = feed.state(), config.train.keep_checkpoints, extra, config.train.keep_best
                checkpoint.save(config.run_dir, step, model, optimizer, scheduler, *kept)
                log.save()
            if milestones.exports_after(step):
                exports.export_step(config, source, model, step)
        if dropped := feed.dropped_by_reason():
            log.message(f"dropped samples: {dropped}; which and why: {config.run_dir}/drops")
        watchdog.beat("leaving the other ranks")
    lock.close()
    setup.shutdown()


def starting_model(config: RunConfig, source: Source) -> list[Module]:
    """This rank's chunks, with the source's weights unless a checkpoint provides all that the run needs."""
    resumes = checkpoint.exists(config.run_dir) and config.train.objective == "tokens"  # dpo needs the start
    chunks = open_model(config, source, resumes, run_dir=config.run_dir)
    return data_parallel(chunks, config)


def opening_words(
    config: RunConfig, source: Source, feed: Feed, resumed: checkpoint.CheckpointState | None
) -> Iterator[str]:
    """Lines that a user should know before the first step."""
    if resumed:
        yield from resumed.words()
        if config.data.restart:
            yield "data.restart: the data begins again from here"
    yield from words_of_start(config)
    yield from feed.words()
    yield from exports.words(config, source)
