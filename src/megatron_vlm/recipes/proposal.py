"""`--model … --data …`: a run that needs no recipe, because one is written for it by a fixed rule."""

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megatron_vlm.checks import is_energon
from megatron_vlm.config import MISSING, RunConfig, all_settings
from megatron_vlm.data.on_disk.paths import paths_of, tar_shards
from megatron_vlm.messages import printable
from megatron_vlm.overrides import apply_overrides, from_yaml
from megatron_vlm.recipes.published import RATES, USUAL, shipped_config
from megatron_vlm.supported import read_config
from megatron_vlm.validate import sizes_in

ROWS_IN_A_STEP = 32
STEPS_BETWEEN_SAVES = 500  # as in the recipes
# what a recipe shows also where it is the default
ALWAYS_SHOWN = {"optimizer.lr", "optimizer.weight_decay", "optimizer.lr_scheduler_type", "data.seq_length"}
LAYOUT = "parallel.", "model.recompute"  # who sets one of these chooses the layout
# what may differ when a run goes on: where it ends, what it shows and keeps, and how it is spread
MAY_DIFFER = (
    *(
        "name",
        "run_dir",
        *LAYOUT,
        "logging.",
        "train.steps",
        "train.epochs",
        "train.eval_",
        "train.save_every",
    ),
    *("train.keep_", "train.hang_seconds", "train.stop_after", "data.num_workers"),
)


def propose(chosen: Mapping[str, Any], processes: int, has_gpu: bool | None = None) -> RunConfig:
    """Return the run for full fine-tuning of the checkpoint in the user's `chosen` settings, which all stay.

    The layout needs the least memory that data parallelism allows: experts are spread over the processes, and
    layers recomputed. Who sets a part of the layout chooses all of it.

    Args:
        chosen: Settings by dotted key, `model.hf_path` among them. Commands that read no data need no data.
        processes: Processes of the run.
        has_gpu: Whether they have GPUs; None: look on this machine.
    """
    if has_gpu is None:  # torch is not imported for this: the driver's own program tells of a GPU
        has_gpu = shutil.which("nvidia-smi") is not None
    requested = apply_overrides(RunConfig(), chosen)
    data = [] if requested.data.train_data_path == MISSING else paths_of(requested.data.train_data_path)
    parts = [Path(requested.model.hf_path).name, *(Path(path).name.partition(".")[0] for path in data[:1])]
    name = chosen.get("name") or "-".join(parts)
    config_file = shipped_config(requested.model.hf_path) or requested.model.hf_path
    rates = USUAL
    with suppress(OSError, ValueError):  # the checks that follow name what is wrong with a checkpoint
        rates = RATES.get(read_config(config_file)["model_type"], USUAL)
    settings = {
        "name": name,
        "run_dir": f"runs/{name}",
        "data.dataset_type": dataset_type_of(data[0]) if data else "hf",
        "train.global_batch_size": -(-ROWS_IN_A_STEP // processes) * processes,
        "train.save_every": STEPS_BETWEEN_SAVES,
        "optimizer.lr": rates.adapter_lr if requested.adapter.used else rates.lr,
        "optimizer.weight_decay": rates.weight_decay,
        "optimizer.warmup_steps": None,
    }
    # a CPU has no kernels for bf16; on GPUs the user's own layout is left alone
    if not has_gpu:
        settings["model.dtype"] = "fp32"
    elif not any(key.startswith(LAYOUT) for key in chosen):
        experts = sizes_in(read_config(config_file)).get("num_moe_experts") or 1
        settings |= {"model.recompute": "full", "parallel.ep": math.gcd(experts, processes)}
    if not {"train.steps", "train.epochs"} & set(chosen):
        settings |= {"train.steps": None, "train.epochs": 1}
    # validation needs rows that are held out
    if {"data.valid_data_path", "data.validation_share"} & set(chosen):
        settings["train.eval_every"] = STEPS_BETWEEN_SAVES
    return apply_overrides(RunConfig(), settings | dict(chosen))


def dataset_type_of(path: str) -> str:
    """Return the `data.dataset_type` of what lies at a path."""
    return "energon" if is_energon(path) or tar_shards(path)[1] else "hf"


def as_recipe(config: RunConfig, command: str) -> str:
    """Return a file for --config with what differs from the defaults, and `ALWAYS_SHOWN`.

    `command` is the line that made it.
    """
    usual = all_settings(RunConfig())
    sections: dict[str, Any] = {}
    for key, value in all_settings(config).items():
        if value != usual[key] or key in ALWAYS_SHOWN:
            section, _, name = key.rpartition(".")
            (sections.setdefault(section, {}) if section else sections)[name] = value
    head = f"# Made by `{printable(command, 10_000)}`; edit it, and start it by --config.\n"
    return head + yaml.safe_dump(sections, sort_keys=False, width=10_000)


def changes(recipe: str, config: RunConfig) -> list[str]:
    """Return the settings in which a run differs from a recipe that `as_recipe` wrote, with both values.

    Those in which a run may differ when it goes on are left out.
    """
    before = all_settings(from_yaml(recipe))
    return [
        f"{key} is {before[key]!r} there and {value!r} here"
        for key, value in all_settings(config).items()
        if value != before[key] and not key.startswith(MAY_DIFFER)
    ]
