"""The keyword arguments that all recipes share, each the short name of one setting."""

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict, get_type_hints

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.messages import suggestion
from megatron_vlm.overrides import apply_overrides


class RecipeArgs(TypedDict, total=False):
    """The keyword arguments of every recipe, with the setting of `RunConfig` that each one sets."""

    name: Annotated[str, "name"]
    run_dir: Annotated[str, "run_dir"]
    hf_path: Annotated[str, "model.hf_path"]
    load_weights: Annotated[bool, "model.load_weights"]
    dtype: Annotated[str, "model.dtype"]
    freeze: Annotated[list[str], "model.freeze"]
    fallbacks: Annotated[list[str], "model.fallbacks"]
    recompute: Annotated[str, "model.recompute"]
    tp: Annotated[int, "parallel.tp"]
    pp: Annotated[int, "parallel.pp"]
    vpp: Annotated[int, "parallel.vpp"]
    cp: Annotated[int, "parallel.cp"]
    ep: Annotated[int, "parallel.ep"]
    sp: Annotated[bool | None, "parallel.sp"]
    dataset_type: Annotated[str, "data.dataset_type"]
    train_data_path: Annotated[str | list[str], "data.train_data_path"]
    valid_data_path: Annotated[str | list[str] | None, "data.valid_data_path"]
    seq_length: Annotated[int, "data.seq_length"]
    max_pixels: Annotated[int | None, "data.max_pixels"]
    num_workers: Annotated[int, "data.num_workers"]
    lr: Annotated[float, "optimizer.lr"]
    min_lr: Annotated[float, "optimizer.min_lr"]
    warmup_steps: Annotated[int | None, "optimizer.warmup_steps"]
    offload: Annotated[bool, "optimizer.offload"]
    reduce_in_fp32: Annotated[bool, "optimizer.reduce_in_fp32"]
    objective: Annotated[str, "train.objective"]
    steps: Annotated[int | None, "train.steps"]
    epochs: Annotated[float | None, "train.epochs"]
    micro_batch_size: Annotated[int, "train.micro_batch_size"]
    global_batch_size: Annotated[int, "train.global_batch_size"]
    seed: Annotated[int, "train.seed"]
    eval_every: Annotated[int | str, "train.eval_every"]
    save_every: Annotated[int | str, "train.save_every"]
    wandb_project: Annotated[str | None, "logging.wandb_project"]


SETTING_OF_ARGUMENT: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(RecipeArgs, include_extras=True).items()
}


ARGUMENT_OF_SETTING = {setting: argument for argument, setting in SETTING_OF_ARGUMENT.items()}


def as_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe arguments by the settings they set. Raises ConfigError on an unknown argument."""
    for name in arguments:
        if name not in SETTING_OF_ARGUMENT:
            raise ConfigError(f"{name}: not an argument of a recipe{suggestion(name, SETTING_OF_ARGUMENT)}")
    return {SETTING_OF_ARGUMENT[name]: value for name, value in arguments.items()}


def as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings (by dotted key) that a recipe takes as arguments, by argument name."""
    return {ARGUMENT_OF_SETTING[key]: value for key, value in settings.items() if key in ARGUMENT_OF_SETTING}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's arguments; a layer replaces what those before it set, and `steps` replaces `epochs`, too."""
    found: dict[str, Any] = {}
    for layer in layers:
        gone = {"steps", "epochs"} if {"steps", "epochs"} & layer.keys() else ()
        found = {name: value for name, value in found.items() if name not in gone} | layer
    return found


def build(defaults: RecipeArgs, changes: Mapping[str, Any]) -> RunConfig:
    """The defaults of `RunConfig`, replaced by a recipe's `defaults`, replaced by the caller's `changes`.

    A run without `run_dir` gets `runs/<name>`. A warm-up that the caller did not set takes at most a tenth of
    the steps. Raises ConfigError on an unknown argument or a value of the wrong type; text from a command
    line is converted.
    """
    arguments = merged(defaults, changes)
    arguments.setdefault("run_dir", f"runs/{arguments.get('name', RunConfig.name)}")
    config = apply_overrides(RunConfig(), as_settings(arguments))
    if "warmup_steps" not in changes:
        steps, warmup = config.train.steps, config.optimizer.warmup_steps
        config.optimizer.warmup_steps = None if steps is None else min(warmup or 0, steps // 10)
    return config
