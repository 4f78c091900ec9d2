"""`train --model … --data …`: a run that needs no recipe, because one is written for it by a fixed rule."""

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from megatron_vlm.checks import is_energon
from megatron_vlm.commands.arguments import check, check_run_folder, machines, processes
from megatron_vlm.config import ConfigError, RunConfig, all_settings
from megatron_vlm.data.on_disk.paths import paths_of, tar_shards
from megatron_vlm.files import atomic_write, read_text
from megatron_vlm.messages import printable
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import read_settings
from megatron_vlm.supported import read_config
from megatron_vlm.validate import sizes_in

RECIPE = "recipe.yaml"  # in the run folder
ROWS_IN_A_STEP = 32
STEPS_BETWEEN_SAVES = 500  # as in the recipes
LR_OF_ADAPTERS = 2e-4  # as in recipes/*_lora.yaml
LAYOUT = "parallel.", "model.recompute"  # who sets one of these chooses the layout


def recipe_for(
    model: str | None,
    data: Sequence[str] | None,
    settings: Sequence[str],
    arguments: Mapping[str, Any],
    nproc: int | None,
    dry_run: bool,
) -> Path:
    """Return the file of a recipe for this checkpoint and data, which is printed.

    Nothing is written in a dry run. Raises ConfigError if the checkpoint or the data cannot be used, if the
    run folder holds another recipe, and in torchrun's processes.
    """
    if not (model and data):
        raise ConfigError(
            "--model and --data belong together: a checkpoint, and what to train it on; give both."
        )
    if processes(None) is not None or machines() > 1:
        raise ConfigError(
            "--model and --data make a recipe for one machine; write it there, with --dry-run, and give it "
            "to torchrun's processes as --config FILE."
        )
    # torch is not imported for this: the driver's own program tells of a GPU
    has_gpu = shutil.which("nvidia-smi") is not None
    config = propose(model, data, read_settings(settings, arguments), nproc or 1, has_gpu)
    check(config, nproc)
    check_run_folder(config)
    text = as_recipe(config, shlex.join(["megatron-vlm", *sys.argv[1:]]))
    typer.echo(text)
    file = Path(config.run_dir) / RECIPE
    if dry_run:
        return file
    # a start with the same settings goes on; the first line is the command, which may differ
    if file.exists() and read_text(file).partition("\n")[2] != text.partition("\n")[2]:
        raise ConfigError(
            f"{file} holds another recipe; go on with that by --config {file}, "
            "remove it, or give another --run_dir."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text)
    typer.echo(f"wrote {file}")
    return file


def propose(
    model: str, data: Sequence[str], chosen: Mapping[str, Any], processes: int, has_gpu: bool
) -> RunConfig:
    """Return the run for full fine-tuning. The user's `chosen` settings stay as they are.

    The layout needs the least memory that data parallelism allows: experts are spread over the processes, and
    layers recomputed. Who sets a part of the layout chooses all of it.
    """
    first = paths_of(data)[0]
    name = chosen.get("name") or f"{Path(model).name}-{Path(first).name.partition('.')[0]}"
    settings = {
        "name": name,
        "run_dir": f"runs/{name}",
        "model.hf_path": model,
        "data.dataset_type": "energon" if is_energon(first) or tar_shards(first)[1] else "hf",
        "data.train_data_path": data[0] if len(data) == 1 else list(data),
        "train.global_batch_size": -(-ROWS_IN_A_STEP // processes) * processes,
        "train.save_every": STEPS_BETWEEN_SAVES,
        "optimizer.warmup_steps": None,
    }
    # a CPU has no kernels for bf16; on GPUs the user's own layout is left alone
    if not has_gpu:
        settings["model.dtype"] = "fp32"
    elif not any(key.startswith(LAYOUT) for key in chosen):
        experts = sizes_in(read_config(model)).get("num_moe_experts") or 1
        settings |= {"model.recompute": "full", "parallel.ep": math.gcd(experts, processes)}
    if not {"train.steps", "train.epochs"} & set(chosen):
        settings |= {"train.steps": None, "train.epochs": 1}
    # adapters learn at a higher rate, and validation needs rows that are held out
    if apply_overrides(RunConfig(), chosen).adapter.used:
        settings["optimizer.lr"] = LR_OF_ADAPTERS
    if {"data.valid_data_path", "data.validation_share"} & set(chosen):
        settings["train.eval_every"] = STEPS_BETWEEN_SAVES
    return apply_overrides(RunConfig(), settings | dict(chosen))


def as_recipe(config: RunConfig, command: str) -> str:
    """Return a file for --config with what differs from the defaults; `command` is the line that made it."""
    usual = all_settings(RunConfig())
    sections: dict[str, Any] = {}
    for key, value in all_settings(config).items():
        if value != usual[key]:
            section, _, name = key.rpartition(".")
            (sections.setdefault(section, {}) if section else sections)[name] = value
    head = f"# Made by `{printable(command, 10_000)}`; edit it, and start it by --config.\n"
    return head + yaml.safe_dump(sections, sort_keys=False, width=10_000)
