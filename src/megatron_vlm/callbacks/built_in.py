"""The callbacks of a run, in the order in which they are called."""

from collections.abc import Sequence
from importlib import import_module

from megatron_vlm.callbacks import Callback, Callbacks, callback_class, check_methods
from megatron_vlm.callbacks.checkpoints import Checkpoints, SaveNotices
from megatron_vlm.callbacks.exports import Exports
from megatron_vlm.callbacks.preemption import Heartbeat, Preemption
from megatron_vlm.callbacks.run_log import RunLog
from megatron_vlm.callbacks.samples import Samples
from megatron_vlm.callbacks.spikes import Spikes
from megatron_vlm.callbacks.trackers import trackers_of
from megatron_vlm.callbacks.validation import Best, Validation
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.data.on_disk.paths import items_of
from megatron_vlm.parallel import setup


def callbacks_of(config: RunConfig, user_callbacks: Sequence[Callback] = ()) -> Callbacks:
    """The callbacks of the package that the configuration asks for, and the user's.

    What changes the metrics of a step, or ends the run, comes before what writes and validates: the last
    step is then known. `on_save` comes when the exports of its step are there, too.
    """
    for callback in user_callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks: {callback!r} is no object of a Callback; give one, as MyCallback()."
            )
        check_methods(f"callbacks: {type(callback).__name__}", type(callback))
    train = config.train
    # these change the metrics of a step, or end the run
    callbacks: list[Callback] = [Heartbeat(), Samples()]
    if train.on_spike is not None:
        callbacks.append(Spikes(train.on_spike))
    callbacks.append(Preemption(train.stop_after))
    callbacks += [*user_callbacks, *(callback_class(name)() for name in items_of(train.callbacks))]
    # these write what is known of the step by now
    callbacks.append(RunLog(config))
    if setup.is_first_rank():
        callbacks += trackers_of(config)
        if config.logging.report:
            callbacks.append(_extra("report.live", "LivePage")())
    # these decide about checkpoints, and write them
    callbacks += [Best(train), Validation()]
    if train.score_every or (train.keep_best and train.best_is_score):
        callbacks.append(_extra("evaluate.in_training", "Scoring")())
    checkpoints = Checkpoints()
    callbacks.append(checkpoints)
    if train.export_every:
        callbacks.append(Exports())
    callbacks.append(SaveNotices(checkpoints))
    if train.upload_to:
        callbacks.append(_extra("stores.uploads", "Uploads")())
    return Callbacks(callbacks)


def _extra(module: str, name: str) -> type[Callback]:
    return getattr(import_module(f"megatron_vlm.extras.{module}"), name)
