"""The story of one run: from a Hugging Face checkpoint and a dataset to a trained model."""

from __future__ import annotations

import time

from megatron_vlm import watchdog
from megatron_vlm.config import RunConfig, derived
from megatron_vlm.data.batch_log import BatchLog, naming_samples
from megatron_vlm.data.sources import RunData
from megatron_vlm.failures import closing
from megatron_vlm.metrics import RunLogger
from megatron_vlm.models.hf import load_processor, open_source
from megatron_vlm.models.vlm import build_model
from megatron_vlm.models.weights import import_hf
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.broadcast import BatchBroadcaster, add_counts
from megatron_vlm.training import checkpoint
from megatron_vlm.training.evaluate import validation_loss
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import data_parallel, train_step


def train(config: RunConfig) -> None:
    """Train to `config.train.steps`, on from the run folder's latest checkpoint where it has one.

    Called by every process of the layout. The run folder then holds checkpoints, metrics and pictures.
    """
    setup.init_distributed(config.parallel, config.train.seed)
    lock = checkpoint.claim(config.run_dir, config.model.hf_path)
    source = open_source(config.model.hf_path, checkpoint.saved_tied(config.run_dir))
    hf_config, family, processor = source.hf_config, source.family, load_processor(source.folder)

    watchdog.beat("building the model")
    model = build_model(config, family, hf_config, setup.device(), processor)
    if config.model.load_weights and not checkpoint.exists(config.run_dir):
        watchdog.beat(f"importing {source.folder}", files=True)
        import_hf(model, source.folder, family, hf_config)
    model = data_parallel(model, config)
    optimizer, scheduler = build_optimizer(model, config)
    watchdog.beat(f"loading the last checkpoint of {config.run_dir}", files=True)
    resumed = checkpoint.load_latest(config.run_dir, model, optimizer, scheduler)
    start = resumed.step if resumed else 0

    watchdog.beat("opening the data")
    broadcaster = BatchBroadcaster()
    data = None
    if broadcaster.reads:
        rank, world_size = setup.data_parallel_place()
        data = RunData(
            config,
            processor,
            family.visual_keys,
            family.position_ids(hf_config),
            rank,
            world_size,
            images_or_videos=family.images_or_videos,
        )
        watchdog.also(data.drops.glance)
        if resumed and not config.data.restart:
            data.train_loader.load_states(resumed.loader_states)
        batch_log = BatchLog(config.run_dir, rank, world_size, start + 1)
    batches = data and data.train_batches()

    trained = resumed.extra.get("trained_tokens") if resumed else None
    log = RunLogger(config.run_dir, config, config.train.steps, start + 1, setup.is_first_rank(), trained)
    if resumed:
        log.message(f"resumed after step {start} from {resumed.path}")
        if resumed.later:
            log.message(f"{', '.join(resumed.later)} stay until their steps are saved again")
        if config.data.restart:
            log.message("data.restart: the data begins anew from here")

    if data and data.hf_because:
        log.message(f"data: the Hugging Face processor encodes every sample, slower: {data.hf_because}")

    micro_batches_per_step = derived(config, setup.world_size())["micro_batches_per_step"]
    with closing(log, *([batch_log, data] if data else [])):
        for step in range(start + 1, config.train.steps + 1):
            began, lr = time.monotonic(), optimizer.param_groups[0]["lr"]
            watchdog.beat(f"waiting for the data of step {step}")
            micro_batches = broadcaster.take(batches, micro_batches_per_step, data and data.drops)
            if data:
                batch_log.write(step, micro_batches)
            watchdog.beat(f"training step {step}")
            with naming_samples(config.run_dir, step, micro_batches):
                loss, tokens, grad_norm = train_step(model, optimizer, scheduler, micro_batches)
            watchdog.beat(step=step)
            seconds = time.monotonic() - began
            log.log_step(step, loss, lr, grad_norm, tokens, seconds, data and data.dropped_everywhere)

            if is_due(step, config.train.eval_every, config.train.steps):
                watchdog.beat(f"evaluating after step {step}")
                valid_batches = data and data.valid_batches()
                valid_loss = validation_loss(model, broadcaster, valid_batches, config.train.eval_steps)
                if valid_loss is not None:
                    log.log_eval(step, valid_loss)
            if is_due(step, config.train.save_every, config.train.steps) or step == config.train.steps:
                watchdog.beat(f"saving step {step} in {config.run_dir}", files=True)
                loader_state = data and data.train_loader.state_dict()
                checkpoint.save(
                    config.run_dir,
                    step,
                    model,
                    optimizer,
                    scheduler,
                    loader_state,
                    config.train.keep_checkpoints,
                    extra={"trained_tokens": log.trained_tokens},
                )
                log.save()
        if dropped := add_counts(data.dropped if data else {}):
            log.message(f"dropped samples: {dropped}; which and why: {config.run_dir}/drops")
        watchdog.beat("leaving the other ranks")
    lock.close()
    setup.shutdown()


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` steps is done after `step`; also after the last; never when 0."""
    return every > 0 and (step % every == 0 or step == last)
