"""Checkpoints of a run, on Megatron's dist_checkpointing: saved by one layout, loaded by any.

    <run_dir>/checkpoints/latest                 name of the newest complete checkpoint
    <run_dir>/checkpoints/step_00000100/         Megatron's files: model and optimizer, by tensor name
    <run_dir>/checkpoints/step_00000100/state.json   step, layout, schedule, generators, data loaders
    <run_dir>/checkpoints/step_00000200.tmp/     being written, or left by a run that was killed

Only the run's own folder is ever looked at. Nothing is loaded that could run code: Megatron's objects are
read with `weights_only`, torch's pickled `.metadata` only after a look at what it names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import queue
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from megatron_vlm.training.optimizer import torch_adams

_STATE = "state.json"
_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # by parameter, so that TP and PP may change
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass
class CheckpointState:
    """What `load_latest` restored, and what it could not."""

    step: int
    path: Path
    loader_states: list[Any]  # as the data-parallel ranks saved them, in order, however many they are now
    rng_restored: bool  # only under the layout that saved
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    run_dir: str | Path,
    step: int,
    model_chunks: list,
    optimizer,
    scheduler,
    loader_state: Any = None,
    keep: int = 2,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of `step`; every rank calls it. Returns its folder.

    `loader_state` is JSON data from the ranks that read (one per data-parallel rank), None elsewhere;
    `extra` is JSON data, rank 0's is kept. `latest` changes only when everything is on disk, then all but
    the `keep` newest checkpoints go. A step that `latest` already names is not written again.
    """
    folder = Path(run_dir) / "checkpoints"
    final = folder / f"step_{step:08d}"
    if _latest_name(folder) == final.name:
        return final
    partial = final.with_suffix(".tmp")
    if dist.get_rank() == 0:
        _remove_partial(folder)
        shutil.rmtree(final, ignore_errors=True)  # complete, but `latest` never named it
        partial.mkdir(parents=True)
    dist.barrier()
    _write_tensors(partial, model_chunks, optimizer)
    ranks = _gather(_rank_state(loader_state))
    if dist.get_rank() == 0:
        state = {
            "step": step,
            "layout": _layout(),
            "tied": unwrap_model(model_chunks[0]).share_embeddings_and_output_weights,
            "schedule": scheduler.state_dict(),
            "extra": extra or {},
            "ranks": ranks,
        }
        _write_synced(partial / _STATE, json.dumps(state))
        os.rename(partial, final)
        _write_synced(folder / "latest.tmp", final.name + "\n")
        os.replace(folder / "latest.tmp", folder / "latest")
        _prune(folder, final.name, keep)
    dist.barrier()
    return final


def exists(run_dir: str | Path) -> bool:
    """Whether the run folder holds a complete checkpoint."""
    return (Path(run_dir) / "checkpoints" / "latest").is_file()


def saved_tied(run_dir: str | Path) -> bool | None:
    """Whether the newest complete checkpoint's output layer is its embedding; None where nothing says so.

    Asked before a model is built to load it: what the run's source says may have changed since. Collective.
    """
    folder = Path(run_dir) / "checkpoints"
    name = _latest_name(folder)
    file = folder / str(name) / _STATE
    return json.loads(file.read_text()).get("tied") if name and file.is_file() else None


def load_latest(
    run_dir: str | Path, model_chunks: list, optimizer=None, scheduler=None
) -> CheckpointState | None:
    """Restore the newest complete checkpoint of `run_dir`, in place; None when there is none.

    Model, Adam's moments and step, and the schedule's step are restored exactly, under whatever layout saved
    them; the learning rate, its schedule and weight decay stay as configured now. Generators are restored
    when the layout is the same. Without an optimizer only the model is read. Raises ValueError for a folder
    that is damaged or unsafe to read, `CheckpointingException` when tensors are missing from it.
    """
    folder = Path(run_dir) / "checkpoints"
    name = _latest_name(folder)
    if name is None:
        return None
    path = folder / name
    if not (path / _STATE).is_file():
        raise ValueError(
            f"checkpoint: {folder / 'latest'} names {name}, which is not complete in {folder}; restore it, "
            "name another in latest, or delete latest to start anew."
        )
    state = json.loads((path / _STATE).read_text())
    _read_tensors(path, model_chunks, optimizer, scheduler)
    if scheduler is not None:
        scheduler.load_state_dict(state["schedule"])
    same_layout = state["layout"] == _layout()
    if same_layout:
        _restore_rng(state["ranks"][dist.get_rank()]["rng"])
    return CheckpointState(state["step"], path, _loader_states(state), same_layout, state["extra"])


# ---- tensors, by Megatron ---------------------------------------------------------------------------------


def _write_tensors(path: Path, model_chunks: list, optimizer) -> None:
    # Megatron asks a manager process for a queue even when it writes in this one; it costs seconds to start.
    filesystem_async._results_queue = queue.Queue()
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    state = _sharded_state(model_chunks, optimizer, loading=False)
    try:
        dist_checkpointing.save(state, str(path), strategy)
    except CheckpointException as error:
        free = shutil.disk_usage(path).free
        raise OSError(
            f"checkpoint: {path} could not be written, with {free / 1e9:.1f} GB free there: "
            f"{_reasons(error)}. The last complete checkpoint stays as it was; make room and start again."
        ) from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


def _read_tensors(path: Path, model_chunks: list, optimizer, scheduler) -> None:
    _check_metadata(path / ".metadata")
    wanted = _sharded_state(model_chunks, optimizer, loading=True)
    with _weights_only():
        loaded = dist_checkpointing.load(wanted, str(path))
    for name, model in _named_models(model_chunks):
        model.load_state_dict(loaded[name])
    if optimizer is not None:
        _load_optimizer(optimizer, loaded["optimizer"], scheduler)


def _named_models(model_chunks: list) -> list[tuple[str, torch.nn.Module]]:
    """Megatron's optimizers expect "model", or "model0", "model1", ... under virtual stages."""
    models = [unwrap_model(chunk) for chunk in model_chunks]
    return [("model", models[0])] if len(models) == 1 else [(f"model{i}", m) for i, m in enumerate(models)]


def _sharded_state(model_chunks: list, optimizer, loading: bool) -> dict[str, Any]:
    state = {name: model.sharded_state_dict() for name, model in _named_models(model_chunks)}
    if optimizer is not None:
        for adam in torch_adams(optimizer):
            _give_state(adam)
        models = state["model"] if "model" in state else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(
            models, is_loading=loading, metadata=dict(_OPTIMIZER_FORMAT)
        )
    return state


def _give_state(adam: torch.optim.Adam) -> None:
    """torch allocates Adam's state at the first step; Megatron wants it there to save or load."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _load_optimizer(optimizer, loaded, scheduler) -> None:
    if scheduler is not None:
        _follow_config(loaded, {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr})
    optimizer.load_state_dict(loaded)
    for adam in torch_adams(optimizer):
        for state in adam.state.values():  # Megatron gives all parameters one tensor, which all count up
            state["step"] = state["step"].clone() if "step" in state else torch.tensor(0.0)


def _follow_config(loaded, current: dict[str, float]) -> None:
    """Megatron finds saved parameter groups by their learning rates too, and would fail on a new one."""
    if isinstance(loaded, dict):
        for group in loaded.get("param_groups", ()):
            group.update(current)
        for value in loaded.values():
            _follow_config(value, current)


# ---- what is not a tensor of the model --------------------------------------------------------------------


def _layout() -> dict[str, int]:
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
    json.dumps(loader_state)  # a TypeError here names what is not data, before anything is written
    return {"dp_rank": parallel_state.get_data_parallel_rank(), "rng": _rng(), "loader": loader_state}


def _loader_states(state: dict[str, Any]) -> list[Any]:
    saved = {entry["dp_rank"]: entry["loader"] for entry in state["ranks"] if entry["loader"] is not None}
    return [saved[rank] for rank in sorted(saved)]


def _rng() -> dict[str, Any]:
    version, keys, gauss = random.getstate()
    name, np_keys, *np_rest = np.random.get_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(keys), gauss],
        "numpy": [name, np_keys.tolist(), *np_rest],
        "torch": _to_text(torch.get_rng_state()),
        "device": _to_text(torch.cuda.get_rng_state()),
        "tracker": {name: _to_text(state) for name, state in tracker.items()},
    }


def _restore_rng(rng: dict[str, Any]) -> None:
    version, keys, gauss = rng["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, *np_rest = rng["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), *np_rest))
    torch.set_rng_state(_from_text(rng["torch"]))
    torch.cuda.set_rng_state(_from_text(rng["device"]))
    states = {name: _from_text(text) for name, text in rng["tracker"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(states)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- folders ----------------------------------------------------------------------------------------------


def _latest_name(folder: Path) -> str | None:
    """Rank 0's answer on every rank, whatever a network file system shows to the others."""
    answer = [None]
    if dist.get_rank() == 0 and (folder / "latest").is_file():
        answer = [(folder / "latest").read_text().strip()]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    return answer[0]


def _remove_partial(folder: Path) -> None:
    for leftover in folder.glob("step_*.tmp"):
        shutil.rmtree(leftover)


def _prune(folder: Path, newest: str, keep: int) -> None:
    """Later steps stay: they are there when somebody set `latest` back, and are not ours to delete."""
    complete = sorted(path.name for path in folder.glob("step_*") if (path / _STATE).is_file())
    for old in [name for name in complete if name <= newest][: -max(keep, 1)]:
        shutil.rmtree(folder / old)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# ---- safe reading -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """torch's checkpoint planner calls `torch.load(weights_only=False)`; this variable overrules it."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


_CHECKPOINT = "torch.distributed.checkpoint."
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_CHECKPOINT + "filesystem", "_StorageInfo"),
    *((_CHECKPOINT + "metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_CHECKPOINT + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_CHECKPOINT + "metadata", name) for name in ("TensorProperties", "TensorStorageMetadata")),
    (_CHECKPOINT + "metadata", "_MEM_FORMAT_ENCODING"),
    *((_CHECKPOINT + "planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem")),
    (_CHECKPOINT + "planner", "WriteItemType"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the plain records torch writes into `.metadata`, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _METADATA_NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _check_metadata(path: Path) -> None:
    """Raise ValueError when `.metadata`, which torch unpickles, names what torch does not write there."""
    try:
        with open(path, "rb") as file:
            _MetadataUnpickler(file).load()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"checkpoint: {path} is not the metadata of a checkpoint of ours ({error}); "
            "name another checkpoint in latest, or delete latest to start anew."
        ) from error
