"""Checks what a configuration names on disk, before anything heavy starts: every problem, a line each."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_vlm.checks.data_on_disk import data_problems, record_problems
from megatron_vlm.checks.model_on_disk import (
    checkpoint_problems,
    read_json,
    run_dir_problems,
    start_problems,
    upload_problems,
)
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.config_rules.layout import misfit, sizes_in
from megatron_vlm.objectives import objective_of


def validate_paths(config: RunConfig, needs_data: bool = True) -> None:
    """Check what the configuration names on disk; remote names are only looked up in the caches.

    Raises ConfigError with every problem found, one a line.
    """
    problems = list(model_problems(config, needs_data, objective_of(config).reference_passes > 0))
    if needs_data:
        data = config.data
        for key in ("train_data_path", "valid_data_path"):
            problems += data_problems(data, f"data.{key}", getattr(data, key))
        rows = replace(data, dataset_type="hf")
        problems += data_problems(rows, "data.score_path", data.score_path)
        problems += record_problems(config)
    problems += [*run_dir_problems(config.run_dir), *upload_problems(config.train.upload_to)]
    word = re.match(r"\s*([\w./-]+)(\s|$)", config.train.on_export or "")
    known = ["sh", "-c", 'command -v "$1"', "", word[1]] if word else ["true"]
    if subprocess.run(known, stdout=subprocess.DEVNULL).returncode:
        problems.append(f"train.on_export: sh knows no {word[1]}; correct it, or give its whole path.")
    if problems:
        raise ConfigError("\n".join(problems))


def validate_model(config: RunConfig, needs_processor: bool) -> None:
    """Does as `validate_paths` for commands that build a run's model and neither read data nor train."""
    if problems := list(model_problems(config, needs_processor)):
        raise ConfigError("\n".join(problems))


def model_problems(config: RunConfig, needs_processor: bool, needs_start: bool = False) -> Iterator[str]:
    """Messages about a model that cannot be built: its checkpoint, the layout, the adapter to begin with.
    `needs_start`: also a run with checkpoints reads the weights that it started from."""
    resumes = any(Path(config.run_dir, "checkpoints").glob("step_*/state.json"))
    needed = config.adapter.used or not resumes or needs_start
    folder = Path(config.model.hf_path).expanduser()
    load_weights = config.model.load_weights and needed
    needs_template = config.data.chat_template is None
    problems = list(checkpoint_problems(config.model.hf_path, load_weights, needs_processor, needs_template))
    yield from problems
    if not problems:
        sizes = sizes_in(read_json(folder / "config.json") or {})
        yield from filter(None, [misfit(config.parallel, sizes)])
    if config.adapter.start is not None and not (
        resumes and Path(config.run_dir, "checkpoints", "adapter_start").is_dir()
    ):
        yield from start_problems(config.adapter.start)
