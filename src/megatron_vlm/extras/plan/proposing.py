"""`train --model … --data …`: a run that needs no recipe, because one is made for it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from megatron_vlm.checks.paths import is_energon, validate_paths
from megatron_vlm.commands.arguments import check, check_run_folder
from megatron_vlm.commands.program import machines, world_size
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.config_rules.layout import check_gpus
from megatron_vlm.data.on_disk.paths import paths_of
from megatron_vlm.files import read_text, write_whole
from megatron_vlm.messages import printable
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import said
from megatron_vlm.run_folder.folder import is_used
from megatron_vlm.supported import read_config

RECIPE = "recipe.yaml"  # in the run folder
MOST_SHOWN = 200  # characters of a line that is printed: a chat template is one of thousands
MADE_BY = "# Made by `"  # how `Proposal.to_yaml` begins


def recipe_for(
    model: str | None,
    data: Sequence[str] | None,
    settings: Sequence[str],
    arguments: Mapping[str, Any],
    nproc: int | None,
    dry_run: bool,
) -> tuple[Path, int | None]:
    """The file of a recipe for this checkpoint and data, which is printed, and the processes to start.

    Nothing is written in a dry run. Raises ConfigError if the checkpoint or the data cannot be used, if no
    layout fits, if the run folder holds a run of another recipe, and in torchrun's processes.
    """
    if not (model and data):
        raise ConfigError(
            "--model and --data belong together: a checkpoint, and what to train it on; give both."
        )
    if world_size() is not None or machines() > 1:
        raise ConfigError(
            "--model and --data find a layout for one machine; write the recipe there, with --dry-run, and "
            "give it to torchrun's processes as --config FILE."
        )
    source = source_settings(model, data)
    theirs = said(settings, arguments)
    assumed = {"run_dir": "runs", **source, **theirs, "adapter.start": None}  # a run may have a copy of that
    validate_paths(apply_overrides(RunConfig(), assumed))
    read_config(model)
    gpus = memory_of_gpus()
    check_gpus(nproc or 1, len(gpus))
    with _gpus_hidden():  # before torch is imported: Megatron would use what it sees
        from megatron_vlm.extras.plan.proposal import propose
        from megatron_vlm.models.families import describe
        from megatron_vlm.models.hf import load_config

        proposal = propose(source, describe(load_config(model)), gpus, theirs, nproc)
    config = proposal.config()
    text = proposal.to_yaml(shlex.join(["megatron-vlm", *sys.argv[1:]]))
    check(config, proposal.processes)
    check_run_folder(config)
    typer.echo(
        "\n".join(line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}…" for line in text.split("\n"))
    )
    file = Path(config.run_dir) / RECIPE
    if not dry_run:
        _write(file, text)
    return file, proposal.processes if gpus or proposal.processes > 1 else None


def source_settings(model: str, data: Sequence[str]) -> dict[str, Any]:
    """The settings that name the checkpoint and the data. Raises ConfigError for data of both types."""
    paths = dict(zip(data, paths_of(data), strict=True))
    kinds = {item: "energon" if is_energon(path) else "hf" for item, path in paths.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{printable(path)} ({kind})" for path, kind in kinds.items())
        raise ConfigError(
            f"--data: {listed}: one run reads one type of data; prepare the others with "
            "`megatron-vlm prepare`, or leave them out."
        )
    return {
        "model.hf_path": model,
        "data.dataset_type": kinds[data[0]],
        "data.train_data_path": data[0] if len(data) == 1 else list(data),
    }


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    note = ""
    if file.exists() and _without_command(read_text(file)) != _without_command(text):
        if is_used(file.parent):
            raise ConfigError(
                f"{printable(file)} holds another recipe; go on with that by --config {printable(file)}, "
                "remove it, or give another --run_dir."
            )
        old = Path(f"{file}.old")
        if old.exists() and not read_text(old).startswith(MADE_BY):
            raise ConfigError(
                f"{printable(old)} exists, and this command did not write it; move it away: there the other "
                f"recipe in {printable(file)} is to be kept."
            )
        file.replace(old)  # of a run that failed before its first step, or somebody's work
        note = f"; what was there is {old}"
    write_whole(file, text)
    typer.echo(f"wrote {file}{note}")


def _without_command(text: str) -> str:
    return text.partition("\n")[2]


def memory_of_gpus() -> list[int]:
    """Bytes of memory of each GPU that this process may use, as nvidia-smi lists them; none without it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    sizes = [int(line) << 20 for line in listed.split() if line.isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sizes
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if all(name.isdigit() and int(name) < len(sizes) for name in names):
        return [sizes[int(name)] for name in names]
    return sizes[: len(names)]  # UUIDs


@contextmanager
def _gpus_hidden() -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
