"""The keyword arguments that all recipes share, each the short name of one setting."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.messages import suggestion
from megatron_vlm.overrides import apply_overrides

# By the group of `RunConfig` that holds the setting; `config` has their types.
ARGUMENTS_OF_GROUP = {
    "": ("name", "run_dir"),
    "model.": ("hf_path", "load_weights", "dtype", "freeze", "fallbacks", "recompute"),
    "parallel.": ("tp", "pp", "vpp", "cp", "ep", "sp", "tp_comm_overlap"),
    "data.": (
        *("dataset_type", "train_data_path", "valid_data_path"),
        *("seq_length", "max_pixels", "num_workers"),
    ),
    "optimizer.": ("lr", "min_lr", "warmup_steps", "offload", "reduce_in_fp32"),
    "train.": (
        *("objective", "steps", "epochs", "micro_batch_size", "global_batch_size"),
        *("seed", "eval_every", "save_every", "callbacks"),
    ),
    "logging.": ("wandb_project",),
}
SETTING_OF_ARGUMENT = {name: group + name for group, names in ARGUMENTS_OF_GROUP.items() for name in names}
ARGUMENT_OF_SETTING = {setting: argument for argument, setting in SETTING_OF_ARGUMENT.items()}
# names of Hugging Face's trainers and of peft, and what sets the same here
NAMES_ELSEWHERE = {
    **{"learning_rate": "lr", "output_dir": "run_dir", "num_train_epochs": "epochs", "max_steps": "steps"},
    **{"save_steps": "save_every", "eval_steps": "eval_every", "model_name_or_path": "hf_path"},
    **{"per_device_train_batch_size": "micro_batch_size", "max_length": "seq_length"},
    "gradient_accumulation_steps": "global_batch_size, the samples of a step on all devices,",
    **{"lora_r": "adapter.r", "lora_alpha": "adapter.lora_alpha", "lora_dropout": "adapter.lora_dropout"},
    **{"max_grad_norm": "optimizer.clip_grad", "weight_decay": "optimizer.weight_decay"},
}


def as_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe arguments by the settings they set. Raises ConfigError on an unknown argument."""
    for name in arguments:
        if name not in SETTING_OF_ARGUMENT:
            hint = suggestion(name, SETTING_OF_ARGUMENT)
            if name.lower() in ("lora", "peft"):
                hint = "; adapter.r=16 trains LoRA of that rank."
            if name in NAMES_ELSEWHERE:
                hint = f"; {NAMES_ELSEWHERE[name]} is its name here."
            raise ConfigError(f"{name}: not an argument of a recipe{hint}")
    return {SETTING_OF_ARGUMENT[name]: value for name, value in arguments.items()}


def as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings (by dotted key) that a recipe takes as arguments, by argument name."""
    return {ARGUMENT_OF_SETTING[key]: value for key, value in settings.items() if key in ARGUMENT_OF_SETTING}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's arguments; a layer replaces what those before it set, and `steps` replaces `epochs`, too."""
    arguments: dict[str, Any] = {}
    for layer in layers:
        replaced = {"steps", "epochs"} if {"steps", "epochs"} & layer.keys() else ()
        arguments = {name: value for name, value in arguments.items() if name not in replaced} | layer
    return arguments


def build(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> RunConfig:
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
