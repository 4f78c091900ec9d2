"""Checkpoints of a run, on Megatron's dist_checkpointing: saved by one layout, loaded by any.

    <run_dir>/checkpoints/step_00000100/         Megatron's files: model and optimizer, by tensor name
    <run_dir>/checkpoints/step_00000100/state.json   step, layout, schedule, generators, data loaders, and the
                                                 size and checksum of every other file

`run_folder` decides which checkpoint is the newest, and its `complete` makes one whole: by a rename,
when all else is on disk. `tensor_files` writes and reads tensors. Only the run's own folder is ever read.
"""

import base64
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import unwrap_model

from megatron_vlm import run_folder
from megatron_vlm.config import AdapterConfig, ConfigError, RunConfig, all_settings
from megatron_vlm.files import read_text
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.job import watchdog
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.overrides import load_yaml
from megatron_vlm.parallel.setup import from_all_ranks, on_first_rank
from megatron_vlm.training.tensor_files import (
    PinnedSnapshot,
    bytes_to_write,
    read_tensors,
    sharded_state,
    write_tensors,
)

# settings on which it depends what a checkpoint holds; a resumed run keeps its own copy of `adapter.start`
SHAPING = {"model.freeze", "parallel.distributed_optimizer", "optimizer.offload"}
SHAPING |= {"optimizer.lr_by_part", "optimizer.weight_decay_by_part"}
SHAPING |= {f"adapter.{f.name}" for f in fields(AdapterConfig)} - {"adapter.start", "adapter.lora_dropout"}


@dataclass
class CheckpointInfo:
    """The facts of the newest complete checkpoint; the defaults if there is none."""

    step: int = 0
    path: Path | None = None
    tied: bool | None = None  # whether the output layer is the embedding; None if that is not known
    extra: dict[str, Any] = field(default_factory=dict)
    # one per data-parallel rank that saved, in order; their number may differ now
    loader_states: list[Any] = field(default_factory=list)
    # of each rank, with which bits stay the same; empty if the layout differs now, or it was not saved
    threads: list[int] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)  # `kernel_checks.chosen` of all ranks


def claim(run_dir: str | Path, hf_path: str) -> BinaryIO:
    """The lock that lets this run write into its folder. Every rank calls this first and keeps the result.

    The lock is held until it is closed or the process ends. Leftovers of a killed run are removed. Raises
    ConfigError on every rank as `check_start` does: another run is active here, the folder belongs
    to another model, or its newest checkpoint is not known.
    """
    locks = []

    def first() -> None:
        with run_folder.add_path_to_errors(Path(run_dir)):
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            run_folder.check_start(run_dir, hf_path)
            locks.append(run_folder.take_lock(run_dir))
        run_folder.tidy(run_dir)
        run_folder.remove_leftovers(Path(run_dir))  # of pages and pictures

    on_first_rank(first)
    watchdog.claim_files()
    return locks[0] if locks else run_folder.join_lock(run_dir)


def save(*arguments: Any, **options: Any) -> Path:
    """Write a checkpoint as `begin_save` begins it; every rank calls it. Returns its folder."""
    return begin_save(PinnedSnapshot(), *arguments, **options)(None)


Write = Callable[[dist.ProcessGroup | None], Path]


def begin_save(
    copies: PinnedSnapshot,
    run_dir: str | Path,
    step: int,
    model_chunks: list,
    optimizer,
    scheduler,
    loader_state: Any = None,
    keep: int = 2,
    extra: dict[str, Any] | None = None,
    keep_best: bool = False,
) -> Write:
    """Copy what a checkpoint of `step` needs to host memory. Returns a function that writes it, given a group
    of all ranks, and returns its folder: it may run on a thread while they train. Both are collective.

    `loader_state` is JSON data from the ranks that read (one per data-parallel rank), None elsewhere; `extra`
    is JSON data, of which rank 0's is kept. `latest` changes only when everything is on disk; then all but
    the `keep` newest checkpoints are removed and, if asked for, the one with the lowest `rated` in its
    `extra`. A step that `latest` names already is not written again. Raises OSError with the place, the bytes
    to write and the bytes free; `latest` then stays as it was.
    """
    final = run_folder.checkpoints(run_dir) / f"step_{step:08d}"
    if on_first_rank(run_folder.is_latest, final):
        return lambda group: final
    watchdog.beat(f"saving step {step} in {run_dir}")
    # all ranks must know the bytes before any is written: a full disk is refused now
    ranks = from_all_ranks(_rank_state(loader_state))
    tensors = sharded_state(model_chunks, optimizer, loading=False)
    needed = sum(from_all_ranks(bytes_to_write(tensors)))
    partial = on_first_rank(run_folder.begin, run_dir, step, needed)
    copied = copies.take(partial, tensors)
    # the rest is small, and rank 0 writes it when all tensors are on disk
    state = {"step": step, "layout": layout(), "schedule": dict(scheduler.state_dict())}
    state["tied"] = unwrap_model(model_chunks[0]).share_embeddings_and_output_weights
    state |= {"config": _config_values(model_chunks), "adapters": _adapters(model_chunks)}
    state |= {"extra": extra or {}, "ranks": ranks}

    def write(group: dist.ProcessGroup | None) -> Path:
        write_tensors(partial, copied, needed, group)
        with run_folder.add_path_to_errors(partial):
            rank_checksums = run_folder.checksums(partial, _files_of_rank(os.listdir(partial)))
            checksums_of_ranks = from_all_ranks(rank_checksums, group)
        return on_first_rank(finish, checksums_of_ranks, group=group)

    def finish(checksums_of_ranks: list[dict[str, list]]) -> Path:
        files = {
            name: size_and_checksum for rank in checksums_of_ranks for name, size_and_checksum in rank.items()
        }
        final = run_folder.complete(partial, {**state, "files": files})
        run_folder.prune(run_dir, final.name, keep, keep_best)
        return final

    return write


@contextmanager
def naming_changes(config: RunConfig) -> Iterator[None]:
    """Name, in an error from inside, the settings that shape a checkpoint and were changed since.

    The run folder's config.yaml still has the earlier values: a resumed run writes it later.
    """
    try:
        yield
    except Exception as error:
        file = Path(config.run_dir, "config.yaml")
        text = read_text(file) if file.exists() else ""
        before = load_yaml(text, str(file)) if text.strip() else {}
        changes = []
        for name, value in all_settings(config).items():
            section, _, key = name.partition(".")
            saved_value = before.get(section, {}).get(key, value) if name in SHAPING else value
            if saved_value != value:
                changes.append(f"{name} was {saved_value} and is {value}")
        if not changes:
            raise
        raise ConfigError(
            f"checkpoint: {'; '.join(changes)}, so it does not fit; set that back, or start "
            "another run_dir from an export of this run."
        ) from error


@attribute_errors_to("run_dir")
def saved(run_dir: str | Path) -> CheckpointInfo:
    """Call it before a model is built to load it: the run's source may have changed since. Collective."""

    def read() -> CheckpointInfo:
        path = run_folder.latest_checkpoint(run_dir)
        return _saved(path, _state(path)) if path else CheckpointInfo()

    return on_first_rank(read)


@attribute_errors_to("run_dir")
def load_latest(
    run_dir: str | Path, model_chunks: list, optimizer=None, scheduler=None
) -> CheckpointInfo | None:
    """Restore the newest complete checkpoint of `run_dir` in place; None if there is none.

    Model, Adam's moments and step, and the schedule's step are restored exactly, whatever layout saved them.
    Learning rates, their schedule, weight decay and Adam's settings stay as configured now. Generators are
    restored if the layout is the same. Without an optimizer only the model is read. Raises ConfigError if the
    newest is not known (see `latest_checkpoint`), if a file is not what was saved (the error names
    it), if it is unsafe to read, or if it is of another model: one field of config.json is enough for that.
    """
    path = on_first_rank(run_folder.latest_checkpoint, run_dir)
    if path is None:
        return None
    watchdog.beat(f"loading the last checkpoint of {run_dir}")
    state = _checked_state(path)
    check_config(path, state.get("config"), _config_values(model_chunks))
    check_adapters(path, state.get("adapters"), _adapters(model_chunks))
    read_tensors(path, model_chunks, optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(state["schedule"])
    if state["layout"] == layout():
        _restore_generators(state["ranks"][dist.get_rank()]["rng"])
    return _saved(path, state)


def _saved(path: Path, state: dict[str, Any]) -> CheckpointInfo:
    loaders = {rank["dp_rank"]: rank["loader"] for rank in state["ranks"] if rank["loader"] is not None}
    in_order = [loaders[rank] for rank in sorted(loaders)]
    is_same_layout = state["layout"] == layout()
    threads = [rank["threads"] for rank in state["ranks"] if is_same_layout and "threads" in rank]
    kernels = {part: name for rank in state["ranks"] for part, name in rank.get("kernels", {}).items()}
    return CheckpointInfo(state["step"], path, state["tied"], state["extra"], in_order, threads, kernels)


def _config_values(model_chunks: list) -> dict[str, Any] | None:
    """`Description.config_values`; None for a model without a description."""
    return getattr(unwrap_model(model_chunks[0]), "config_values", None)


def _adapters(model_chunks: list) -> list[str] | None:
    """Fingerprints of the checkpoint that adapters adapt, and of the adapters; None for a model without."""
    adapters = getattr(unwrap_model(model_chunks[0]), "adapters", None)
    return None if adapters is None else [adapters.base, adapters.fingerprint]


# ---- files ------------------------------------------------------------------------------------------------


def _files_of_rank(names: Iterable[str]) -> list[str]:
    """The files (`__RANK_0.distcp`) that this rank wrote, and its share of files of ranks that are gone."""
    writers = {name: int(re.match(r"(?:__(\d+)_)?", name)[1] or 0) for name in names}
    return [name for name, writer in writers.items() if writer % dist.get_world_size() == dist.get_rank()]


def _checked_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint, after a check that its files are as saved: one rank reads each file."""
    state = on_first_rank(_state, path)
    problems = on_first_rank(run_folder.size_problems, path, state["files"])
    if not problems:
        rank_files = {name: state["files"][name] for name in _files_of_rank(state["files"])}
        local_problems = run_folder.checksum_problems(path, rank_files)
        problems = [text for rank in from_all_ranks(local_problems) for text in rank]
    if problems:
        raise ConfigError(run_folder.damaged(path, problems))
    return state


def _state(path: Path) -> dict[str, Any]:
    try:
        return run_folder.read_state(path)
    except ValueError as error:
        raise ConfigError(run_folder.damaged(path, [str(error)])) from error


# ---- what is not a tensor of the model --------------------------------------------------------------------


def layout() -> dict[str, int]:
    """How this job's processes are laid out."""
    ps = parallel_state
    return {
        "world": dist.get_world_size(),
        "dp": ps.get_data_parallel_world_size(),
        "tp": ps.get_tensor_model_parallel_world_size(),
        "pp": ps.get_pipeline_model_parallel_world_size(),
        "vpp": ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": ps.get_context_parallel_world_size(),
        "ep": ps.get_expert_model_parallel_world_size(),
    }


def _rank_state(loader_state: Any) -> dict[str, Any]:
    json.dumps(loader_state)  # raises TypeError for what is not JSON data, before anything is written
    return {
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "rng": _generator_states(),
        "threads": torch.get_num_threads(),
        "kernels": kernel_checks.chosen,
        "loader": loader_state,
    }


# ---- random generators -----------------------------------------------------------------------------------


def _generator_states() -> dict[str, Any]:
    """The states of python, numpy, torch, the device and Megatron's tracker, as JSON data."""
    name, np_keys, *np_rest = np.random.get_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": [name, np_keys.tolist(), *np_rest],
        "torch": _to_text(torch.get_rng_state()),
        "device": _to_text(torch.cuda.get_rng_state()),
        "tracker": {name: _to_text(state) for name, state in tracker.items()},
    }


def _restore_generators(rng: dict[str, Any]) -> None:
    """Set all generators to the states that `_generator_states` returned."""
    version, keys, gauss = rng["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(rng["numpy"]))
    torch.set_rng_state(_from_text(rng["torch"]))
    torch.cuda.set_rng_state(_from_text(rng["device"]))
    states = {name: _from_text(text) for name, text in rng["tracker"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(states)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def check_config(path: Path, saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Raises ConfigError, which names each key, if a checkpoint's model had another config.json than now.

    The values come from `limits.checked`. Two versions of Transformers may have different defaults, so
    nothing is compared across them. A key that only one of both models reads is not compared: a key that
    both read decides that, and differs.
    """
    if not saved or not now or saved["transformers_version"] != now["transformers_version"]:
        return
    if names := [name for name in saved if name in now and saved[name] != now[name]]:
        changes = [f"{name} was {saved[name]!r} and is {now[name]!r}" for name in names]
        raise ConfigError(
            f"checkpoint: {path} was saved with another config.json of model.hf_path: "
            f"{'; '.join(changes)}. Put it back as it was, or give another run_dir."
        )


def check_adapters(path: Path, saved: list[str] | None, now: list[str] | None) -> None:
    """Raises ConfigError unless the saved adapters, if it holds any, belong to this model."""
    if saved == now:
        return
    if saved is None or now is None:
        kinds = ["adapters", "whole weights"]
        saved_kind, run_kind = reversed(kinds) if saved is None else kinds
        reason = (
            f"holds {saved_kind}, and this run trains {run_kind}; set adapter.* as it was, or give another "
            "run_dir."
        )
    elif saved[0] != now[0]:
        reason = (
            f"holds adapters of a base model with fingerprint {saved[0]}, and model.hf_path has "
            f"{now[0]}; give the checkpoint on which they were trained, or another run_dir."
        )
    else:
        reason = (
            "holds adapters of other modules, ranks or scales; set adapter.* as it was, or another run_dir."
        )
    raise ConfigError(f"checkpoint: {path} {reason}")
