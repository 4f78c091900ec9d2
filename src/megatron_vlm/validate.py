"""Relations between settings, and whether a layout fits processes, GPUs and a model; without torch."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from megatron_vlm.adapter_settings import adapter_problems
from megatron_vlm.adapter_settings import problem as pattern_problem
from megatron_vlm.config import (
    EPOCH,
    ConfigError,
    DataConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    all_settings,
    fewest_processes,
)
from megatron_vlm.data.on_disk.paths import DataSource, sources_of
from megatron_vlm.imports import is_users
from megatron_vlm.messages import join_lines, plural, suggestion
from megatron_vlm.objectives import OBJECTIVES, objective_of
from megatron_vlm.overrides import setting_problems

# sizes of a model by Megatron's names: under which keys config.json has them
SIZE_KEYS = {
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "num_moe_experts": ("num_experts", "n_routed_experts"),
}


def validate(config: RunConfig, world_size: int | None = None) -> None:
    """Check all that needs no files, torch or model; `world_size` None: any number of processes.

    Raises ConfigError with every problem of single settings or, without any, of their relations, one a line.
    """
    problems = setting_problems(config)
    if (name := config.train.objective) not in OBJECTIVES and not is_users(name):
        hint = suggestion(name, [*OBJECTIVES, "FILE.py:NAME of your own"])
        problems.append(f"train.objective: {name} does not exist{hint}")
    if not problems:
        problems += _relation_problems(config)
        problems += layout_problems(config.parallel, world_size)
    if not problems:  # the next check divides by values that were just checked
        problems += _batch_problems(config, world_size)
    if problems:
        raise ConfigError(join_lines(problems))


def _relation_problems(config: RunConfig) -> Iterator[str]:
    if len(set(config.model.freeze)) == 3:
        yield "model.freeze: tower, projector and language_model are all there is; leave one of them out."
    yield from adapter_problems(config)
    yield from _source_problems(config.data)
    yield from _packing_problems(config.data)
    yield from _length_problems(config)
    yield from _part_problems(config)
    yield from _score_problems(config)
    yield from objective_of(config).problems(config)
    if config.train.reward_names and config.train.objective != "grpo":
        yield "train.rewards: only train.objective=grpo learns from rewards; set it, or leave them out."
    optimizer = config.optimizer
    steps = config.train.steps
    if steps is not None and not (optimizer.warmup_steps or 0) < steps:
        yield f"optimizer.warmup_steps: {optimizer.warmup_steps} is not within the run's {steps} steps."
    if optimizer.offload and not config.parallel.distributed_optimizer:
        yield "optimizer.offload: needs parallel.distributed_optimizer; drop one of the two."
    if config.train.deterministic and config.model.attention == "cudnn":
        yield "model.attention: cudnn adds in no fixed order; with train.deterministic, take auto or flash."
    if not optimizer.min_lr <= optimizer.lr:
        yield f"optimizer.min_lr: {optimizer.min_lr} is not between 0 and lr {optimizer.lr}."


def _score_problems(config: RunConfig) -> Iterator[str]:
    train = config.train
    name, more_is_better = train.best_figure
    if not (train.best_is_score or name.startswith("valid_")):
        yield f"train.best_by: {name} is no figure to choose by; give one that begins with valid_ or score/."
    elif more_is_better is None and not train.best_is_score and name.partition("/")[0] != "valid_loss":
        yield f"train.best_by: nothing tells whether more {name} is better; give max:{name} or min:{name}."
    every = "score_every" if train.best_is_score else "eval_every"
    if train.patience and not (getattr(train, every) or (train.keep_best and train.save_every)):
        yield f"train.patience: {name} is not looked at before the end; set train.{every}."
    is_scored = train.score_every or (train.keep_best and train.best_is_score)
    if train.score_metric != TrainConfig().score_metric and not is_scored:
        yield "train.score_metric: nothing is scored; set train.score_every, or leave it out."
    if train.on_export is not None and not train.export_every:
        yield "train.on_export: nothing is exported; set train.export_every, or leave it out."


def _length_problems(config: RunConfig) -> Iterator[str]:
    train = config.train
    data = config.data
    if train.epochs is not None and train.steps is not None:
        yield (
            f"train.epochs: {train.epochs:g}, and train.steps is {train.steps}; both say when the run ends: "
            "set one of them to null."
        )
    if train.epochs is None and train.steps is None:
        yield "train.steps: not set, and neither is train.epochs; give one of them."
    counted = [key for key, value in all_settings(config).items() if value == EPOCH]
    if train.epochs is not None:
        counted.append("train.epochs")
    for key in counted:
        if data.streaming or data.packing == "stream":
            kind = "a stream" if data.streaming else "rows packed from a buffer (data.packing=stream)"
            instead = "" if data.streaming or data.dataset_type == "energon" else ", or data.packing=global"
            yield f"{key}: only its end tells how many rows an epoch of {kind} has; count steps{instead}."


def _part_problems(config: RunConfig) -> Iterator[str]:
    for name, values in config.optimizer.by_part.items():
        for part in values:
            key = f"{name}: {part}"
            if problem := pattern_problem(part):
                yield f"{key} is no part of the model and no pattern of Python's re ({problem}); correct it."
            if part == "adapters" and not config.adapter.used:
                yield f"{key}: the run has none, as adapter.r is 0; drop it, or set adapter.r=16."
            if part in config.model.freeze:
                yield f"{key} is frozen by model.freeze; drop it in one of them."
    if config.optimizer.lr_by_part and config.optimizer.lr == 0:
        yield "optimizer.lr_by_part: optimizer.lr is 0; set it, and freeze what is not to be trained."


def _source_problems(data: DataConfig) -> Iterator[str]:
    for key in ("train_data_path", "valid_data_path"):
        yield from _item_problems(data, f"data.{key}", sources_of(getattr(data, key)))
    if data.min_pixels and data.max_pixels and data.min_pixels > data.max_pixels:
        yield f"data.min_pixels: {data.min_pixels} is over data.max_pixels {data.max_pixels}; lower it."
    if data.resize_jitter and not (data.min_pixels and data.max_pixels):
        yield "data.resize_jitter: it draws between data.min_pixels and data.max_pixels; set both."
    if data.validation_share and data.valid_data_path is not None:
        yield "data.validation_share: data.valid_data_path is given, too; drop one of them."
    # what is for the other kind of data
    if data.dataset_type == "energon":
        for name in ("datasets", "media_dir", "streaming", "validation_share"):
            if getattr(data, name):
                yield f"data.{name}: is for dataset_type hf; an energon dataset has it settled when prepared."
        if data.parser:
            yield "data.parser: is for dataset_type hf; for an energon dataset give data.cooker."
    if data.parser and data.columns:
        yield "data.columns: data.parser gives records with our names; drop one of them."
    for name in ("cooker", "sample_loader"):
        if data.dataset_type == "hf" and getattr(data, name):
            yield f"data.{name}: is for dataset_type energon; for other records give data.parser."
    if len(sources_of(data.train_data_path)) > 1:
        for name in ("streaming", "datasets"):
            if getattr(data, name):
                yield f"data.{name}: is for a single data.train_data_path; drop it or the other paths."
    if data.streaming:
        for name in ("datasets", "validation_share"):
            if getattr(data, name):
                yield f"data.{name}: needs data that lie here, and data.streaming has none; drop one of them."


def _item_problems(data: DataConfig, key: str, sources: list[DataSource]) -> Iterator[str]:
    paths = [(source.path, source.subset) for source in sources]
    for path in {path for path, subset in paths if paths.count((path, subset)) > 1}:
        yield f"{key}: {path} is given twice; give it once, as {path}*2."
    names = [source.name for source in sources if source.name is not None]
    for name in dict.fromkeys(names):
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            yield f"{key}: {name!r} before = is no name; take up to 40 letters, digits, _ and -, or a path."
        alike = [other for other in names if f"{other}-".startswith(f"{name}-")]  # as keys begin
        if len(alike) > 1:
            yield f"{key}: the names {', '.join(alike)} begin alike; give each source one of its own."
    for source in sources:
        if source.rows == 0 or source.share == 0:
            yield f"{key}: {source.path}: an epoch would have none of its rows; leave it out."
        if data.streaming and key == "data.train_data_path" and (source.subset or not source.whole):
            yield f"{key}: {source.path}: a stream is read whole; drop what follows the path, or streaming."
        repeats = source.share and source.share.is_integer() and len(sources) > 1
        if data.dataset_type == "energon" and (source.subset or not (source.whole or repeats)):
            yield (
                f"{key}: {source.path}: an energon dataset is read whole or, beside others, several times: "
                "give an integer after `*`, or drop what follows the path."
            )


def _packing_problems(data: DataConfig) -> Iterator[str]:
    if data.streaming or data.dataset_type == "energon":
        reason = (
            "needs all lengths at once, which a stream and an energon dataset have not; use packing=stream."
        )
        if data.packing == "global":
            yield f"data.packing: global {reason}"
        if data.group_by_length:
            yield f"data.group_by_length: {reason}"
    if data.packing != "none" and data.group_by_length:
        yield f"data.group_by_length: is for unpacked rows, packing is {data.packing}; set one of them."
    if data.packing == "none" and data.max_patches is not None:
        yield f"data.max_patches: {data.max_patches} limits packed rows, packing is none; set packing."


def _batch_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    train = config.train
    parallel = config.parallel
    data_parallel = (world_size or fewest_processes(parallel)) // parallel.model_size
    rows = train.micro_batch_size * data_parallel
    micro_batches, remainder = divmod(train.global_batch_size, rows)
    if remainder:
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


# -- the layout


def layout_problems(parallel: ParallelConfig, world_size: int | None) -> Iterator[str]:
    """Messages for the user about a wrong layout; `world_size` None: any number of processes."""
    if parallel.vpp > 1 and parallel.pp == 1:
        yield f"parallel: vpp {parallel.vpp} divides pipeline stages, but pp is 1; raise pp or use vpp 1."
    if parallel.vision_dp and parallel.tp * parallel.cp == 1:
        yield "parallel: vision_dp spreads images over tp · cp ranks, here one; raise tp or cp, or drop it."
    if parallel.sp and parallel.tp == 1:
        yield "parallel: sp splits the sequence over tensor-parallel ranks, but tp is 1; raise tp or drop sp."
    if parallel.tp > 1 and parallel.tp_comm_overlap and not parallel.sequence_parallel:
        yield "parallel: tp_comm_overlap needs sequence parallelism; turn it off, or drop sp=false."
    if parallel.tp > 1 and parallel.ep > 1 and not parallel.sequence_parallel:
        yield f"parallel: tp {parallel.tp} · ep {parallel.ep} needs sequence parallelism; drop sp=false."
    if world_size is None or min(parallel.model_size, parallel.ep) < 1:
        return
    yield from _size_problem({"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}, world_size)
    if parallel.ep > 1:
        yield from _size_problem({"pp": parallel.pp, "ep": parallel.ep}, world_size)


def sizes_in(config_json: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that a config.json states. Those that it leaves to Transformers' defaults are not here."""
    text = config_json.get("text_config")
    text = text if isinstance(text, dict) else config_json
    sizes = {name: text.get(key) for name, keys in SIZE_KEYS.items() for key in keys if key in text}
    if "num_global_key_value_heads" in text:  # the layers differ
        sizes.pop("num_query_groups", None)
    if "num_hidden_layers" in text and not any("expert" in key for key in text):
        sizes["num_moe_experts"] = 0
    return {name: size for name, size in sizes.items() if type(size) is int}


def misfit(parallel: ParallelConfig, sizes: Mapping[str, Any]) -> str | None:
    """Why a layout does not divide a model, whose sizes have Megatron's names; unknown ones are left out.
    Megatron refuses some of it, too, but does not say what to do."""
    tp = parallel.tp
    experts = sizes.get("num_moe_experts") or 0
    stages = parallel.pp * parallel.vpp
    layers = sizes.get("num_layers")
    if layers and stages > layers:
        return (
            f"parallel: pp · vpp = {stages} stages are more than the model's {layers} layers; "
            "lower pp or vpp."
        )
    if parallel.ep > 1 and sizes.get("num_moe_experts") == 0:
        return (
            f"parallel: ep {parallel.ep} spreads experts, and the model has none; drop it, or use tp or pp."
        )
    if experts and tp > 1 and not parallel.sequence_parallel:
        return f"parallel: a mixture of experts at tp {tp} needs sequence parallelism; drop sp=false."
    layer_heads = sizes.get("layer_heads") or ()
    if stages > 1 and (sizes.get("layer_inputs") or any(heads.source is not None for heads in layer_heads)):
        return (
            f"parallel: pp {parallel.pp} would cut a model whose layers take keys and values or inputs from "
            "earlier stages, which is not implemented; use pp 1, with tp, cp or recomputation."
        )
    # what is cut over tensor- or expert-parallel ranks must be divisible
    groups = {heads.groups for heads in layer_heads} or {sizes.get("num_query_groups")}
    delta_heads = sizes.get("delta_heads")
    divisors = [
        ("tp · cp", tp * parallel.cp, "key heads of gated delta nets", delta_heads and delta_heads.keys),
        ("tp", tp, "attention heads", sizes.get("num_attention_heads")),
        *[("tp", tp, "key/value heads", count) for count in groups],
        ("tp", tp, "feed-forward channels", sizes.get("ffn_hidden_size")),
        ("tp", tp, "shared expert channels", sizes.get("moe_shared_expert_intermediate_size")),
        ("ep", parallel.ep, "experts", experts),
    ]
    for name, size, of_what, count in divisors:
        if count and count % size:
            return f"parallel: {name} = {size} does not divide the model's {count} {of_what}; change {name}."
    return None


def check_gpus(processes: int, gpus: int) -> None:
    """Raises ConfigError unless each process of a machine has a GPU, if the machine has any."""
    if 0 < gpus < processes:
        raise ConfigError(
            f"--nproc: {processes} processes need a GPU each, and this machine shows {gpus}; start at most "
            f"{gpus} here, or show more in CUDA_VISIBLE_DEVICES."
        )


def _size_problem(sizes: dict[str, int], world_size: int) -> Iterator[str]:
    size = prod(sizes.values())
    if world_size % size == 0:
        return
    sizes_text = " · ".join(f"{name} {value}" for name, value in sizes.items())
    below = world_size // size * size
    start = f"{below} or {below + size}" if below else f"{size}"
    processes = plural(world_size, "process")
    yield f"parallel: {sizes_text} = {size} does not divide {processes}; change one size or start {start}."
