"""Writes and reads a checkpoint's tensors in Megatron's distributed format: any layout can read them.

Megatron says which rank writes what, and torch's distributed checkpoint writes it: it can do so on a thread,
over a process group of its own, while training goes on.

Nothing is loaded that could run code: Megatron's objects are read with `weights_only`, and torch's pickled
`.metadata` only after a check of the names in it.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.utils import unwrap_model
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from megatron_vlm import run_folder
from megatron_vlm.config import ConfigError
from megatron_vlm.files import add_path_to_errors, free_bytes, open_file
from megatron_vlm.messages import readable_size
from megatron_vlm.models.adapters import model as adapters
from megatron_vlm.parallel.pinned import host_tensors
from megatron_vlm.training.optimizer import fuse, torch_adams

_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",  # by parameter, so that TP and PP may change
    "chained_optim_avoid_prefix": True,
}

_METADATA_NAMES = {  # by module, apart from torch's dtypes
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
}


class PinnedSnapshot:
    """Copies in host memory of what this rank writes of a run's checkpoints, one after the other.

    The model stays the same, so each copy goes where the last was, which must be written by then.
    """

    def __init__(self) -> None:
        self._strategy = _Copying()
        self._to_ranks = FullyParallelSaveStrategyWrapper(
            self._strategy, _replicas(), do_cache_distribution=True
        )

    def take(self, path: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Copies a sharded state. Collective; the folder gets the small file that names the format."""
        is_new = self._to_ranks.cached_distribution is None
        dist_checkpointing.save(state, str(path), self._to_ranks, validate_access_integrity=is_new)
        return self._strategy.copied


class _Copying(TorchDistSaveShardedStrategy):
    """A strategy of Megatron's that writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: dict[str, Any] = {}
        self._places: dict[tuple[Any, ...], torch.Tensor] = {}

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        parts, *_ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        tensors = [part for part in nested_values(parts) if isinstance(part, ShardedTensor)]
        self._make_places(tensors)
        for part in tensors:
            part.data = self._places[_which(part)].copy_(part.data.detach(), non_blocking=True)
        torch.cuda.synchronize()
        self.copied = parts

    def _make_places(self, parts: list[ShardedTensor]) -> None:
        """Gives each part a place of its own, if it has none."""
        new = {_which(part): part.data for part in parts if _which(part) not in self._places}
        pinned = any(data.is_cuda for data in new.values())
        self._places |= zip(new, host_tensors([*new.values()], pinned), strict=True)


def _which(part: ShardedTensor) -> tuple[Any, ...]:
    return part.key, part.global_offset, part.data.shape, part.data.dtype


class _Files(FileSystemWriter):
    @property
    def checkpoint_id(self) -> str:
        return str(self.path)  # as `.metadata` holds it: text, and no object of pathlib


def write_tensors(path: Path, copied: dict[str, Any], needed: int, group: dist.ProcessGroup | None) -> None:
    """Write what `PinnedSnapshot.take` returned. Collective over a group of all ranks.

    Raises OSError if they cannot be written; its text has `needed`, the bytes of all ranks.
    """
    planner = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    try:
        with add_path_to_errors(path):
            state = mcore_to_pyt_state_dict(copied)
            torch_checkpoint.save(state, storage_writer=_Files(path), planner=planner, process_group=group)
    except CheckpointException as error:
        free = free_bytes(path)
        if dist.get_rank() == 0:
            run_folder.remove(path)
        raise OSError(
            f"checkpoint: {path} could not be written: {_reasons(error)}. It takes "
            f"{readable_size(needed)}; {readable_size(free)} were left. The last complete checkpoint stays; "
            "make room (a quota and `ulimit -f` count, too) and start again."
        ) from error


def _replicas() -> dist.ProcessGroup:
    """The ranks that hold the same weights; each writes and reads a share of them."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def bytes_to_write(state: Any) -> int:
    """The bytes of the tensors that this rank writes, or gives to another rank to write."""
    parts = (part for part in nested_values(state) if isinstance(part, ShardedTensor | ShardedTensorFactory))
    return sum(part.data.nbytes for part in parts if is_main_replica(part.replica_id))


def read_tensors(path: Path, model_chunks: list, optimizer) -> None:
    """Restore model and, if given, optimizer in place, whose settings stay as configured now.

    The files are as they were saved. Raises ConfigError for those that are unsafe, or of another model.
    """
    try:
        _check_metadata(path / ".metadata")
    except ValueError as error:
        raise ConfigError(run_folder.damaged(path, [str(error)])) from error
    target_state = sharded_state(model_chunks, optimizer, loading=True)
    try:
        with _weights_only():
            loaded = dist_checkpointing.load(
                target_state,
                str(path),
                FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas()),
            )
    except (CheckpointException, CheckpointingException, EOFError, ValueError) as error:
        raise ConfigError(
            f"checkpoint: {path} does not fit this model and configuration ({_reasons(error)}). "
            "Train as it was trained, or in another run_dir."
        ) from error
    for name, model in named_models(model_chunks):
        if has_adapters(model):  # of a stage without any, nothing was read
            adapters.load_state(model, loaded.get(name, {}))
        else:
            model.load_state_dict(loaded[name])
    if optimizer is not None:
        _load_optimizer(optimizer, loaded["optimizer"])


def _reasons(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_reasons(failure[0])}" for rank, failure in error.failures.items())
    return f"{type(error).__name__}: {error}"


def named_models(model_chunks: list) -> list[tuple[str, torch.nn.Module]]:
    """(name, chunk), named as Megatron's optimizers expect: "model", or "model0", ... with virtual stages."""
    models = [unwrap_model(chunk) for chunk in model_chunks]
    return [("model", models[0])] if len(models) == 1 else [(f"model{i}", m) for i, m in enumerate(models)]


def has_adapters(model: torch.nn.Module) -> bool:
    return getattr(model, "adapters", None) is not None


def sharded_state(model_chunks: list, optimizer, loading: bool) -> dict[str, Any]:
    """Megatron's sharded state of model and optimizer; of a model with adapters, of these alone."""
    state = {
        name: adapters.sharded_state(model) if has_adapters(model) else model.sharded_state_dict()
        for name, model in named_models(model_chunks)
    }
    if optimizer is not None:
        for adam in torch_adams(optimizer):
            _give_state(adam)
        models = state["model"] if "model" in state else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(
            models, is_loading=loading, metadata=dict(_OPTIMIZER_FORMAT)
        )
    return state


def _give_state(adam: torch.optim.Adam) -> None:
    """Allocates Adam's state, which torch does at the first step; Megatron needs it to save or load."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _load_optimizer(optimizer, loaded) -> None:
    # as Megatron's ChainedOptimizer takes them apart
    parts = optimizer.chained_optimizers
    states = [loaded] if len(parts) == 1 else [state for _, state in sorted(loaded.items())]
    for part, state in zip(parts, states, strict=True):
        _follow_config(part, state.get("optimizer", state))
    optimizer.load_state_dict(loaded)
    fuse(optimizer)
    for adam in torch_adams(optimizer):
        for parameter, state in adam.state.items():
            # Megatron gives all parameters one tensor; each would add to it
            step = float(state["step"]) if "step" in state else 0.0
            state["step"] = torch.tensor(step, device=parameter.device)


def _follow_config(part, state: dict) -> None:
    """Gives a saved state the groups of parameters that the configuration makes now; of the saved ones only
    Adam's step stays. Megatron looks for groups with equal learning rates and more, and would find none."""
    steps = [group["step"] for group in state["param_groups"] if "step" in group]
    step = {"step": steps[0]} if steps else {}
    groups = part.optimizer.state_dict()["param_groups"]
    state["param_groups"] = [{**group, **step} for group in groups]


# ---- nothing that its pickles name is run -----------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the plain records torch writes into `.metadata`, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _check_metadata(path: Path) -> None:
    """Raises ValueError if `.metadata`, which torch unpickles, holds anything but what torch writes there.

    Nothing that it names is run. The files that it refers to must lie beside it.
    """
    try:
        with open_file(path) as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        for stored in (metadata.storage_data or {}).values():
            if os.path.basename(stored.relative_path) != stored.relative_path:
                raise ValueError(f"it refers to {stored.relative_path}")
    except Exception as error:  # damaged pickles, and pickles of other things, raise anything
        raise ValueError(f"{path} is not the metadata of a checkpoint of ours ({error})") from error


@contextmanager
def _weights_only() -> Iterator[None]:
    """Sets the variable that overrules the `torch.load(weights_only=False)` of torch's checkpoint planner."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
