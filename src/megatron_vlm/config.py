"""A run's configuration: plain dataclasses, no torch. See `recipes/` for functions that return one and
`validation` for what can be wrong with it.

A setting is named by its dotted key, `train.steps`, everywhere: in overrides, YAML files and errors.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import lcm
from os import PathLike
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

DATA_PATHS = "a path or a list of paths"
DataPaths = Any  # a path, or a list of paths; `paths_of` lists them
# whose `~` is the user's home folder, whoever wrote it: a shell knows only words that begin with it
PATHS = ("run_dir", "hf_path", "media_dir", "lengths_cache", "train_data_path", "valid_data_path")
MISSING = "???"  # a setting without a default; OmegaConf's own mark


class ConfigError(ValueError):
    """The configuration cannot be used as written; the message says where and what to change."""


@dataclass
class ModelConfig:
    hf_path: str = "???"  # folder or hub name of the Hugging Face checkpoint to start from
    load_weights: bool = True  # False: random weights from the config alone
    dtype: str = "bf16"  # "bf16" or "fp32": parameters and activations; gradients and Adam are fp32
    freeze: list[str] = field(default_factory=list)  # of "tower", "projector", "language_model"
    attention: str = "sdpa"  # core attention backend
    recompute: str = "none"  # "none", "selective" or "full": activation recomputation
    load_balancing: float | None = None  # weight of the experts' balance in the loss; None: as the checkpoint


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor
    pp: int = 1  # pipeline
    vpp: int = 1  # virtual pipeline stages per rank (interleaved schedule)
    cp: int = 1  # context
    ep: int = 1  # expert; its ranks are those of tp and of data parallelism
    sp: bool | None = None  # sequence parallel; None: on exactly when tp > 1
    distributed_optimizer: bool = True
    vision_dp: bool | None = None  # images of a micro batch spread over the tp ranks; None: when tp > 1

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def images_spread(self) -> bool:
        return self.tp > 1 if self.vision_dp is None else self.vision_dp

    @property
    def model_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tp * self.pp * self.cp


@dataclass
class DataConfig:
    # "energon", or "hf": what `datasets` opens, JSON(L) of conversations, a meta file of several of these
    dataset_type: str = "energon"
    train_data_path: DataPaths = "???"  # or a list of them, whose samples are mixed
    valid_data_path: DataPaths = None  # None: the validation split of train_data_path, if it has one
    repetitions: list[float] = field(default_factory=list)  # of each train_data_path in an epoch; none: once
    columns: dict[str, str] = field(default_factory=dict)  # ours: the source's, as images: pictures
    datasets: list[str] = field(default_factory=list)  # of a meta file; none: all
    media_dir: str | None = None  # media paths lie under it; None: under the source's own folder
    streaming: bool = False  # training rows as they come from a hub or a store, none written to disk
    seq_length: int = 4096  # most tokens in a row
    over_length: str = "drop"  # "drop" the sample, or "truncate" it to whole images
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float = 2.0  # frames taken of a second of video
    video_max_frames: int = 128  # most frames of a video; of a longer one they are further apart
    video_max_pixels: int | None = None  # larger frames are scaled before the processor sees them
    visual_share: float = 0.5  # of a row's tokens that stand for images: balances the pipeline's first stage
    decode_seconds: float = 60.0  # a sample with an image or a video that takes longer to decode is dropped
    # the run stops when more of the samples than this are dropped, of 100 or, where an epoch has fewer rows,
    # of whole epochs; 0: at the first drop; 1: when a whole epoch gives nothing to train on
    max_drop_share: float = 0.05
    num_workers: int = 2
    # "none": a sample a row; "stream": rows of seq_length packed out of a buffer; "global": out of all
    # samples, their lengths measured before (`tools/precompute_tokens.py`), the rows of a step alike in cost
    packing: str = "none"
    packing_buffer_size: int = 1000  # samples that "stream" packs at a time; a worker holds their images
    max_patches: int | None = None  # most raw patches of images in a packed row; None: no limit
    group_by_length: bool = False  # without packing: samples of about one length share a step
    lengths_cache: str | None = None  # folder of measured lengths; None: in the user's cache
    shuffle_buffer_size: int = 1000
    max_samples_per_sequence: int = 100
    restart: bool = False  # a run that resumes begins its data anew, with samples that it has seen


@dataclass
class OptimizerConfig:
    lr: float = 1e-5
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class TrainConfig:
    steps: int = 1000
    micro_batch_size: int = 1
    global_batch_size: int = 32
    seed: int = 1234
    eval_every: int = 0  # steps between validations; 0: none
    eval_steps: int = 0  # validation steps; 0: the whole validation split
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2
    hang_seconds: float = 480  # the job ends, with all stacks, when no rank comes further for so long


@dataclass
class LoggingConfig:
    log_every: int = 1
    tensorboard: bool = True
    wandb_project: str | None = None


@dataclass
class RunConfig:
    """Everything that determines a run. `run_dir` is where it lives and from where it resumes."""

    name: str = "run"
    run_dir: str = "???"
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def apply_overrides(config: RunConfig, overrides: Iterable[str] | Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with settings replaced; the original stays as it was.

    `overrides` are `key.path=value` texts, or a mapping by dotted or nested keys. Values are converted to
    the setting's type. Raises ConfigError naming the place of an unknown key or of an unfit value.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(split_override(text) for text in overrides)
    tree = OmegaConf.structured(config)
    for key, value in flatten(overrides).items():
        _set(tree, key, value)
    return _build(RunConfig, tree)


def to_yaml(config: RunConfig) -> str:
    """Every setting, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> RunConfig:
    """The inverse of `to_yaml`; what the text leaves out keeps its default. Raises as `apply_overrides`."""
    return apply_overrides(RunConfig(), load_yaml(text))


def load_yaml(text: str, place: str = "YAML") -> dict[str, Any]:
    """A YAML mapping as plain data. Raises ConfigError when it is anything else."""
    try:
        settings = yaml.safe_load(text)
        flatten(settings if isinstance(settings, dict) else {})
    except RecursionError as error:
        raise ConfigError(f"{place}: holds itself, or is nested too deeply; write it out.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{place}: expected settings as `key: value` lines, found {type(settings).__name__}."
        )
    return settings


def paths_of(value: str | Sequence[str] | None) -> list[str]:
    """The paths that a data path stands for."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def all_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting, in the order of the dataclasses."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from all_settings(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def missing_settings(config: RunConfig) -> list[str]:
    """The settings that have no default and were not given."""
    return [key for key, value in all_settings(config) if value == MISSING]


def derived(config: RunConfig, world_size: int | None = None) -> dict[str, int | bool]:
    """The numbers that follow from a valid configuration; `world_size` None: the fewest processes."""
    parallel, train = config.parallel, config.train
    world_size = world_size or fewest_processes(parallel)
    data_parallel = world_size // parallel.model_size
    return {
        "processes": world_size,
        "data_parallel": data_parallel,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batches_per_step": train.global_batch_size // (train.micro_batch_size * data_parallel),
        "most_tokens_per_micro_batch": train.micro_batch_size * config.data.seq_length,
        "most_tokens_per_step": train.global_batch_size * config.data.seq_length,
        "rows_over_all_steps": train.global_batch_size * train.steps,
    }


def fewest_processes(parallel: ParallelConfig) -> int:
    """The smallest number of processes that the layout divides."""
    return lcm(parallel.model_size, parallel.pp * parallel.ep)


def split_override(text: str) -> tuple[str, str]:
    """`key.path=value` in two; the value may hold more equals signs. Raises ConfigError without one."""
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise ConfigError(f"{text}: expected key.path=value, as train.steps=100.")
    return key.strip(), value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    flat = {}
    for key, value in settings.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the known words when none is close."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}."


def _set(tree: DictConfig, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    node = tree
    for place, section in enumerate(sections):
        if node is not None and _types(node).get(section, "").startswith("dict"):
            if isinstance(value, dict | list | tuple):
                raise ConfigError(f"{key}: {value!r} does not fit; expected str.")
            node[section][".".join([*sections[place + 1 :], name])] = str(value)
            return
        node = node[section] if _is_group(node, section) else None
    if node is None or name not in _types(node):
        raise ConfigError(f"{key}: no such setting{_suggest_key(key)}")
    if _is_group(node, name):
        raise ConfigError(f"{key}: a group of settings ({', '.join(node[name])}); set one of them.")
    wanted = _types(node)[name].replace("DataPaths", DATA_PATHS)
    try:
        value = _parse(value, wanted) if isinstance(value, str) else value
        if any(item is None or isinstance(item, dict | list | tuple) for item in _items(value)):
            raise yaml.YAMLError("lists and mappings hold plain values")
        value = _at_home(value) if name in PATHS else value
        OmegaConf.update(node, name, _as_paths(key, value) if wanted == DATA_PATHS else value)
        OmegaConf.to_container(node, resolve=True)  # an interpolation must have something to point to
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: {value!r} does not fit; expected {wanted}.") from error


def _items(value: Any) -> list[Any]:
    """What is in a list or a mapping."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | ListConfig) else []


def _at_home(value: Any) -> Any:
    """A path, or each of several, with the home folder in the place of `~`."""
    if isinstance(value, list | tuple | ListConfig):
        return [_at_home(path) for path in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _parse(text: str, wanted: str) -> Any:
    """Only lists and null need parsing: OmegaConf converts text to numbers and flags by the field's type."""
    if text in ("null", "None") and "None" in wanted:
        return None
    if wanted.startswith("dict"):
        return yaml.safe_load(text if text.startswith("{") else f"{{{text}}}")
    if wanted == DATA_PATHS and not text.startswith("["):
        return None if text in ("null", "None") else text
    if wanted.startswith("list") or wanted == DATA_PATHS:
        return yaml.safe_load(text if text.startswith("[") else f"[{text}]")
    return text


def _as_paths(key: str, value: Any) -> str | list[str] | None:
    if value is None and key.endswith("valid_data_path"):
        return None
    paths = list(value) if isinstance(value, list | tuple | ListConfig) else [value]
    if not paths or not all(isinstance(path, str | PathLike) and str(path) for path in paths):
        raise ConfigError(f"{key}: {value!r} does not fit; expected a path or a list of paths.")
    return str(value) if isinstance(value, str | PathLike) else list(map(str, paths))


def _types(node: DictConfig) -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(OmegaConf.get_type(node))}


def _is_group(node: DictConfig | None, name: str) -> bool:
    return node is not None and _types(node).get(name, "").endswith("Config")


def _suggest_key(key: str) -> str:
    known = [path for path, _ in all_settings(RunConfig())]
    same_name = [path for path in known if path.split(".")[-1] == key.split(".")[-1]]
    return f"; did you mean {same_name[0]}?" if same_name else suggestion(key, known)


def _build(cls: type, node: DictConfig) -> Any:
    """`OmegaConf.to_object` refuses settings that are still missing; a dry run shows them."""
    values = {}
    for f in fields(cls):
        value = MISSING if OmegaConf.is_missing(node, f.name) else node[f.name]
        if isinstance(value, DictConfig) and f.name not in _dicts(node):
            value = _build(OmegaConf.get_type(value), value)
        values[f.name] = _plain(value)
    return cls(**values)


def _dicts(node: DictConfig) -> set[str]:
    return {name for name, wanted in _types(node).items() if wanted.startswith("dict")}


def _plain(value: Any) -> Any:
    return (
        OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
    )
