"""The story of one run: from a Hugging Face checkpoint and a dataset to a trained model."""

import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from statistics import fmean as mean

from torch.nn import Module

from megatron_vlm.callbacks import Callback, Callbacks, Run
from megatron_vlm.callbacks.built_in import callbacks_of
from megatron_vlm.callbacks.run_log import settings_line
from megatron_vlm.config import RunConfig
from megatron_vlm.feed import Feed
from megatron_vlm.job import watchdog
from megatron_vlm.job.errors import closing
from megatron_vlm.job.stops import Stopped
from megatron_vlm.models.adapters.files import notes_of_start
from megatron_vlm.models.hf import Source, open_source
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.weights.by_part import parameters_by_part, trained_share
from megatron_vlm.objectives import objective_of
from megatron_vlm.parallel import cpu, setup
from megatron_vlm.run_folder import with_own_start
from megatron_vlm.training import checkpoint
from megatron_vlm.training.figures import StepFigures
from megatron_vlm.training.optimizer import build_optimizer, learning_rates
from megatron_vlm.training.step import data_parallel, train_step
from megatron_vlm.validate import validate


@setup.left_on_error()
def train(config: RunConfig, callbacks: Sequence[Callback] = ()) -> None:
    """Train to the last of `config.train.steps` or `epochs`, from the run folder's latest checkpoint if any.

    Every process of the layout calls it. Logging, validation, checkpoints, exports and the rest are callbacks
    (`callbacks.built_in`), and `callbacks` are the user's.

    Raises:
        ConfigError: Settings do not fit together.
        Stopped: On every rank, if any was asked to end early; its checkpoint is then there.
    """
    validate(config, int(os.environ.get("WORLD_SIZE", 1)))
    setup.init_distributed(config.parallel, config.train.seed, config.train.deterministic)
    # one job at a time writes a run folder; callbacks may first fetch into it what is resumed
    lock = checkpoint.claim(config.run_dir, config.model.hf_path)
    hooks = callbacks_of(config, callbacks)
    hooks.before_resume(config)
    run = open_run(config, hooks)
    with closing(hooks, run.feed):
        hooks.on_train_begin(run)
        while run.step < run.milestones.last:
            run.step += 1
            train_one_step(run)
        hooks.on_train_end(run)
    lock.close()
    setup.shutdown()
    if run.stopped_by:
        raise Stopped(run.step, run.milestones.steps, " and ".join(run.stopped_by))


def open_run(config: RunConfig, callbacks: Callbacks) -> Run:
    """Open the model, its optimizer and the data, where the newest checkpoint of the run folder left them."""
    saved = checkpoint.saved(config.run_dir)
    threads_note = cpu.resume_threads(saved.threads)
    kernel_checks.chosen.update(saved.kernels)  # so that bits stay the same
    config = setup.on_first_rank(with_own_start, config)  # a resumed run keeps the adapter that it began with
    source = open_source(config.model.hf_path, saved.tied, config.data)
    with watchdog.stage("opening the data"):
        feed = Feed(config, source, saved)
        milestones = setup.on_first_rank(feed.milestones)
    model = starting_model(config, source)
    step_loss = objective_of(config).step_loss(config, model)
    if isinstance(step_loss, Callback):
        callbacks.add_first(step_loss)
    description = source.description
    parts = parameters_by_part(model, config.optimizer.by_part, description.groups, description.rules)
    with watchdog.stage("building the optimizer"):
        optimizer, scheduler = build_optimizer(model, config, milestones.steps, parts)
    with checkpoint.naming_changes(config):
        resumed = checkpoint.load_latest(config.run_dir, model, optimizer, scheduler)
    feed.resume(resumed)
    callbacks.load_state_dict(saved.extra.get("callbacks", {}))
    about_training = [
        "trainable parameters: {:,} of {:,} ({:.2%})".format(*trained_share(model)),
        settings_line(config, milestones.steps, scheduler.lr_warmup_steps),
    ]
    notes = chain(
        notes_of_start(config), feed.notes(milestones), filter(None, [threads_note]), about_training
    )
    return Run(
        config,
        milestones,
        callbacks,
        setup.is_first_rank(),
        step=saved.step,
        notes=list(notes),
        source=source,
        feed=feed,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        step_loss=step_loss,
        figures=StepFigures(config, description, model, feed.sources),
    )


def starting_model(config: RunConfig, source: Source) -> list[Module]:
    """This rank's chunks, with the source's weights unless a checkpoint provides all that the run needs."""
    # an objective that compares with the starting weights needs them also when the run resumes
    saved = checkpoint.saved(config.run_dir)
    resumes = saved.path is not None and not objective_of(config).reference_passes
    chunks = open_model(config, source, resumes, run_dir=config.run_dir)
    return data_parallel(chunks, config)


def train_one_step(run: Run) -> None:
    """One step with the next global batch, and what callbacks do before and after it."""
    # the next batch is read ahead only if there is another step
    began = time.monotonic()
    rates = learning_rates(run.scheduler)
    goes_on = run.milestones.has_step_after(run.step)
    run.micro_batches = run.feed.train(run.step, read_ahead=goes_on)
    waited = time.monotonic() - began
    run.parts = [run.micro_batches]
    judge = partial(run.callbacks.before_optimizer_step, run) if run.callbacks.judge_steps else None
    results = []
    try:
        run.callbacks.on_step_begin(run)
        for number, part in enumerate(run.parts, start=1):
            run.micro_batches = part
            is_last = number == len(run.parts)
            result = train_step(
                run.model,
                run.optimizer,
                run.scheduler,
                run.micro_batches,
                step_loss=run.step_loss,
                figures=run.figures,
                is_last=is_last,
                goes_on=goes_on or not is_last,
                judge=judge,
            )
            results.append(result)
    except Exception as error:
        run.callbacks.on_exception(run, error)
        raise
    # what the step was, for all callbacks
    seconds = time.monotonic() - began
    losses, tokens, norms = zip(*results, strict=True)
    metrics = {"loss": mean(losses), "lr": rates.pop("lr"), "grad_norm": mean(norms), "seconds": seconds}
    metrics |= {"trained_tokens": sum(tokens), **run.figures.of_step(seconds, waited)}
    metrics |= {**run.feed.epoch_after(run.step), **rates}
    run.callbacks.on_step_end(run, metrics)
