"""What a run leaves in its folder, compared between equal runs, and a callback that kills a run."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_vlm.callbacks import Callback
from megatron_vlm.callbacks.run_log import read_rows

# how names end whose values differ between equal runs
OF_THE_MOMENT = ("seconds", "per_second", "per_device", "mfu", "peak_memory_gb")


def figures(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl, but for times and memory."""
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    return [{name: row[name] for name in row if not name.endswith(OF_THE_MOMENT)} for row in rows]


def saved_tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor in the checkpoint of a step: parameters and Adam's moments."""
    reader = dcp.FileSystemReader(run_dir / "checkpoints" / f"step_{step:08d}")
    stored = reader.read_metadata().state_dict_metadata.items()
    state = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in stored
        if isinstance(tensor, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


class Killed(Exception):
    """What `KilledAfter` raises."""


class KilledAfter(Callback):
    """Ends a run in the first step after `step`, as a kill would: nothing is saved or closed for it."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, run, metrics):
        if run.step > self.step:
            raise Killed
