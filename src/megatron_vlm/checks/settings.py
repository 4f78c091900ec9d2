"""Checks a configuration before anything heavy starts: every problem, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path
from typing import Any

from megatron_vlm.checks.adapter_settings import adapter_problems
from megatron_vlm.checks.data_on_disk import data_problems, too_few_records
from megatron_vlm.checks.layout import layout_problems, misfit, sizes_in
from megatron_vlm.checks.model_on_disk import (
    checkpoint_problems,
    read_json,
    run_dir_problems,
    start_problems,
)
from megatron_vlm.checks.objective_settings import objective_problems, pair_problems
from megatron_vlm.checks.patterns import problem as pattern_problem
from megatron_vlm.config import (
    EPOCH,
    ConfigError,
    DataConfig,
    RunConfig,
    all_settings,
    fewest_processes,
    missing_settings,
)
from megatron_vlm.data.on_disk.paths import DataSource, sources_of
from megatron_vlm.messages import suggestion

CHOICES = {
    "train.objective": ("tokens", "dpo"),
    "model.dtype": ("bf16", "fp32"),
    "model.attention": ("auto", "dense", "documents", "varlen"),
    "model.recompute": ("none", "selective", "full"),
    "data.dataset_type": ("energon", "hf"),
    "data.train_replies": ("all", "last"),
    "data.thinking": ("keep", "mask", "drop"),
    "data.over_length": ("drop", "truncate"),
    "data.packing": ("none", "stream", "global"),
}
LONGEST_HANG = 86_400  # seconds
MOST_EPOCHS = 1_000_000  # their ends are counted before the first step
FREEZE_GROUPS = ("tower", "projector", "language_model")
_FROM_ONE = (
    *(f"parallel.{name}" for name in ("tp", "pp", "vpp", "cp", "ep")),
    *(f"train.{name}" for name in ("steps", "micro_batch_size", "global_batch_size", "keep_checkpoints")),
    *(f"data.{name}" for name in ("seq_length", "packing_buffer_size", "max_samples_per_sequence")),
    *(f"data.{name}" for name in ("min_pixels", "max_pixels", "video_max_pixels", "max_patches")),
    *("data.video_max_frames", "train.hang_seconds", "logging.log_every"),
)
_FROM_ZERO = (
    *(f"data.{name}" for name in ("num_workers", "shuffle_buffer_size", "video_fps", "decode_seconds")),
    *(f"data.{name}" for name in ("max_drop_share", "visual_share", "validation_share")),
    *(f"optimizer.{name}" for name in ("lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")),
    *(f"optimizer.{name}" for name in ("beta1", "beta2", "eps")),
    *(f"train.{name}" for name in ("epochs", "seed", "eval_steps", "dpo_beta")),
    *("model.load_balancing", "adapter.r", "adapter.lora_alpha", "adapter.lora_dropout"),
)
EVERY = ("train.eval_every", "train.save_every", "train.export_every")  # a number of steps, or EPOCH
LEAST = dict.fromkeys(_FROM_ONE, 1) | dict.fromkeys(_FROM_ZERO, 0)  # the least value of each number setting
MOST = 2**63 - 1
_NAMES = ("name", "run_dir", "model.hf_path", "data.media_dir", "data.lengths_cache", "adapter.start")
# null, or not empty


def validate(config: RunConfig, world_size: int | None = None) -> None:
    """Check all that needs no files, torch or model; `world_size` None: any number of processes.

    Raises ConfigError with every problem found, one a line.
    """
    problems = [*_setting_problems(config), *layout_problems(config.parallel, world_size)]
    if not problems:  # the next checks divide by values that were just checked
        problems += _batch_problems(config, world_size)
    if problems:
        raise ConfigError("\n".join(problems))


def validate_paths(config: RunConfig, needs_data: bool = True, world_size: int | None = None) -> None:
    """Check what the configuration names on disk; remote names are only looked up in the caches.

    Raises ConfigError with every problem found, one a line.
    """
    found = list(model_problems(config, needs_data, config.train.objective == "dpo"))
    if needs_data:
        data = config.data
        ranks = (world_size or fewest_processes(config.parallel)) // config.parallel.model_size
        for key in ("train_data_path", "valid_data_path"):
            found += data_problems(data, f"data.{key}", getattr(data, key))
        found += [] if found else too_few_records(data, ranks)
        found += pair_problems(data) if config.train.objective == "dpo" else ()
    found += run_dir_problems(config.run_dir)
    if found:
        raise ConfigError("\n".join(found))


def validate_model(config: RunConfig, needs_processor: bool) -> None:
    """As `validate_paths`, for commands that build a run's model and neither read data nor train."""
    if found := list(model_problems(config, needs_processor)):
        raise ConfigError("\n".join(found))


def model_problems(config: RunConfig, needs_processor: bool, needs_start: bool = False) -> Iterator[str]:
    """What keeps the model from being built: its checkpoint, the layout, the adapter to begin with.
    `needs_start`: also a run with checkpoints reads the weights that it started from."""
    resumes = any(Path(config.run_dir, "checkpoints").glob("step_*/state.json"))
    needed = config.adapter.used or not resumes or needs_start
    folder, load_weights = Path(config.model.hf_path).expanduser(), config.model.load_weights and needed
    found = list(checkpoint_problems(config.model.hf_path, load_weights, needs_processor))
    yield from found
    if not found and (problem := misfit(config.parallel, sizes_in(read_json(folder / "config.json") or {}))):
        yield problem
    if config.adapter.start is not None and not (
        resumes and Path(config.run_dir, "checkpoints", "adapter_start").is_dir()
    ):
        yield from start_problems(config.adapter.start)


def _setting_problems(config: RunConfig) -> Iterator[str]:
    settings = dict(all_settings(config))
    for key in missing_settings(config):
        yield f"{key}: not set; pass --{key.split('.')[-1]} or {key}=…"
    for key, choices in CHOICES.items():
        if (value := settings[key]) not in choices:
            yield f"{key}: {value} does not exist{suggestion(value, choices)}"
    for group in set(config.model.freeze) - set(FREEZE_GROUPS):
        yield f"model.freeze: {group} is not a part of the model{suggestion(group, FREEZE_GROUPS)}"
    if set(config.model.freeze) >= set(FREEZE_GROUPS):
        yield "model.freeze: tower, projector and language_model are all there is; leave one of them out."
    yield from adapter_problems(config)
    yield from _source_problems(config.data)
    yield from _packing_problems(config.data)
    yield from _number_problems(settings)
    yield from _every_problems(settings)
    for key in _NAMES:
        if settings[key] == "":
            yield f"{key}: is empty; give a name, or leave the setting out."
    for key in ("data.max_drop_share", "data.visual_share"):
        if settings[key] > 1:
            yield f"{key}: {settings[key]} is not a share between 0 and 1."
    for key in ("optimizer.beta1", "optimizer.beta2", "data.validation_share"):
        if settings[key] >= 1:
            yield f"{key}: {settings[key]} is not less than 1."
    if config.data.video_fps == 0:
        yield f"data.video_fps: {config.data.video_fps} frames of a second are none; the usual number is 2."
    if config.data.decode_seconds == 0:
        yield f"data.decode_seconds: {config.data.decode_seconds} is no time to decode in; the default is 60."
    if config.optimizer.eps == 0:
        yield f"optimizer.eps: {config.optimizer.eps} lets Adam divide by zero; the default is 1e-08."
    if config.train.hang_seconds > LONGEST_HANG:
        yield f"train.hang_seconds: {config.train.hang_seconds:g} is not between 1 and {LONGEST_HANG}."
    yield from _length_problems(config)
    yield from _part_problems(config)
    yield from objective_problems(config)
    optimizer, steps = config.optimizer, config.train.steps
    if (steps or 0) >= 1 and not 0 <= (optimizer.warmup_steps or 0) < steps:
        yield f"optimizer.warmup_steps: {optimizer.warmup_steps} is not within the run's {steps} steps."
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        yield f"optimizer.min_lr: {optimizer.min_lr} is not between 0 and lr {optimizer.lr}."


def _number_problems(settings: dict[str, Any]) -> Iterator[str]:
    for key, least in LEAST.items():
        value = settings[key]
        if value is None:
            continue
        if not isfinite(value):
            yield f"{key}: {value} is not a finite number."
        elif value < least:
            yield f"{key}: {value:g} is less than {least}."
        elif value > MOST:
            yield f"{key}: {value} is more than {MOST}."


def _length_problems(config: RunConfig) -> Iterator[str]:
    train, data = config.train, config.data
    if train.epochs is not None and isfinite(train.epochs) and train.steps is not None:
        yield (
            f"train.epochs: {train.epochs:g}, and train.steps is {train.steps}; both say when the run ends: "
            "set one of them to null."
        )
    if train.epochs is None and train.steps is None:
        yield "train.steps: not set, and neither is train.epochs; give one of them."
    if train.epochs == 0:
        yield "train.epochs: 0 epochs train nothing; give a number above 0, or train.steps."
    if MOST_EPOCHS < (train.epochs or 0) < inf:
        yield f"train.epochs: {train.epochs:g} is more than {MOST_EPOCHS:,}; give fewer, or train.steps."
    if train.keep_best and not train.save_every:
        yield (
            "train.keep_best: with train.save_every=0 only the end is saved, so there is nothing to choose; "
            "set train.save_every, or drop keep_best."
        )
    counted = [key for key in EVERY if getattr(train, key.removeprefix("train.")) == EPOCH]
    for key in [*counted, *(["train.epochs"] if train.epochs is not None else ())]:
        if data.streaming or data.packing == "stream":
            why = "a stream" if data.streaming else "rows packed from a buffer (data.packing=stream)"
            instead = "" if data.streaming or data.dataset_type == "energon" else ", or data.packing=global"
            yield f"{key}: only its end tells how many rows an epoch of {why} has; count steps{instead}."


def _part_problems(config: RunConfig) -> Iterator[str]:
    for name, values in config.optimizer.by_part.items():
        for part, value in values.items():
            key = f"{name}: {part}"
            if why := pattern_problem(part):
                yield f"{key} is no part of the model and no pattern of Python's re ({why}); correct it."
            if not 0 <= value < inf:
                yield f"{key} has {value:g}, which is no number from 0 on; correct it."
            if name == "optimizer.lr_by_part" and value == 0:
                yield f"{key} has 0, which trains nothing; freeze it instead (model.freeze)."
            if part == "adapters" and not config.adapter.used:
                yield f"{key}: the run has none, as adapter.r is 0; drop it, or set adapter.r=16."
            if part in config.model.freeze:
                yield f"{key} is frozen by model.freeze; drop it in one of them."
    if config.optimizer.lr_by_part and config.optimizer.lr == 0:
        yield "optimizer.lr_by_part: optimizer.lr is 0; set it, and freeze what is not to be trained."


def _every_problems(settings: dict[str, Any]) -> Iterator[str]:
    for key in EVERY:
        if (value := settings[key]) != EPOCH and not (type(value) is int and 0 <= value <= MOST):
            yield f"{key}: {value} is neither a number of steps from 0 to {MOST} nor {EPOCH}."


def _source_problems(data: DataConfig) -> Iterator[str]:
    yield from _path_problems(data)
    yield from _held_out_problems(data)
    if data.min_pixels and data.max_pixels and data.min_pixels > data.max_pixels:
        yield f"data.min_pixels: {data.min_pixels} is over data.max_pixels {data.max_pixels}; lower it."
    if data.dataset_type == "energon":
        for name in ("columns", "datasets", "media_dir", "streaming"):
            if getattr(data, name):
                yield f"data.{name}: is for dataset_type hf; an energon dataset has it settled when prepared."
        return
    if data.streaming and (data.packing == "global" or data.group_by_length):
        yield "data.streaming: packing=global and group_by_length need all lengths at once; use stream."
    if data.streaming and data.datasets:
        yield "data.streaming: a meta file is read where it lies; drop streaming or data.datasets."


def _held_out_problems(data: DataConfig) -> Iterator[str]:
    share = f"data.validation_share: {data.validation_share:g}"
    if not data.validation_share:
        return
    if data.valid_data_path is not None:
        yield f"{share} is to be held out, and data.valid_data_path is given, too; drop one of them."
    if data.dataset_type == "energon":
        yield (
            f"{share} is for dataset_type hf; an energon dataset is divided when prepared "
            "(`megatron-vlm prepare --split`)."
        )
    if data.streaming:
        yield f"{share} needs all rows at once, and data.streaming has none; give data.valid_data_path."


def _path_problems(data: DataConfig) -> Iterator[str]:
    for key in ("train_data_path", "valid_data_path"):
        yield from _item_problems(data, f"data.{key}", sources_of(getattr(data, key)))
    if len(sources_of(data.train_data_path)) > 1:
        for name in ("streaming", "datasets"):
            if getattr(data, name):
                yield f"data.{name}: is for a single data.train_data_path; drop it or the other paths."


def _item_problems(data: DataConfig, key: str, sources: list[DataSource]) -> Iterator[str]:
    named = [(source.path, source.subset) for source in sources]
    for path in {path for path, subset in named if named.count((path, subset)) > 1}:
        yield f"{key}: {path} is given twice; give it once, as {path}*2."
    for source in sources:
        if source.rows == 0 or source.share == 0:
            yield f"{key}: {source.path}: an epoch would have none of its rows; leave it out."
        if data.streaming and key == "data.train_data_path" and (source.subset or not source.whole):
            yield f"{key}: {source.path}: a stream is read whole; drop what follows the path, or streaming."
        if data.dataset_type == "energon" and (source.rows or source.subset):
            yield f"{key}: {source.path}: an energon dataset is read whole; drop what follows the path."
        if data.dataset_type == "energon" and not (source.share or 1.0).is_integer():
            yield f"{key}: {source.path}: an energon dataset is repeated whole; give an integer after `*`."
        if data.dataset_type == "energon" and source.share and len(sources) == 1:
            yield f"{key}: {source.path}: is the only one; drop what follows the path, or train longer."


def _packing_problems(data: DataConfig) -> Iterator[str]:
    if data.dataset_type == "energon":
        if data.packing == "global":
            yield "data.packing: global needs all lengths at once, energon datasets are streams; use stream."
        if data.group_by_length:
            yield "data.group_by_length: needs all lengths at once, energon datasets are streams; pack them."
    if data.packing != "none" and data.group_by_length:
        yield f"data.group_by_length: is for unpacked rows, packing is {data.packing}; set one of them."
    if data.packing == "none" and data.max_patches is not None:
        yield f"data.max_patches: {data.max_patches} limits packed rows, packing is none; set packing."


def _batch_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    train, parallel = config.train, config.parallel
    data_parallel = (world_size or fewest_processes(parallel)) // parallel.model_size
    rows = train.micro_batch_size * data_parallel
    micro_batches, rest = divmod(train.global_batch_size, rows)
    if rest:
        start = f"{micro_batches * rows} or {(micro_batches + 1) * rows}" if micro_batches else f"{rows}"
        yield (
            f"train.global_batch_size: {train.global_batch_size} is not divisible by micro_batch_size "
            f"{train.micro_batch_size} × {data_parallel} data-parallel ranks = {rows}; use {start}."
        )
    elif parallel.vpp > 1 and micro_batches % parallel.pp:
        enough = -(-micro_batches // parallel.pp) * parallel.pp * rows
        yield (
            f"train: {micro_batches} micro batches per step is not a multiple of pp {parallel.pp}, as vpp "
            f"{parallel.vpp} needs; use global_batch_size {enough}."
        )
