"""Imports Hugging Face weights: every rank reads the slices that it holds."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.job import watchdog
from megatron_vlm.messages import QUIET
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.rules import (
    EXPERT,
    Rule,
    WeightMap,
    find_rule,
    named_global_weights,
)
from megatron_vlm.parallel.setup import device, use_device

READERS = 4  # threads of a rank: reading waits for disks, and one thread does not fill memory's bandwidth


@attribute_errors_to("path")
def import_hf(chunks: list[MegatronModule], path: str | Path, weight_map: WeightMap) -> None:
    """Fill the weights of this rank's model chunks from the HF checkpoint, reading only their slices.

    Values go straight from the files, mapped into memory, to their places, cast to the parameters' dtype: a
    rank needs little more memory than its weights.

    Raises ValueError before anything is read, with keys and shapes, if the checkpoint has a key that the
    model lacks, lacks one that the model has, or has one of another shape. A collective.
    """
    checkpoint = HFCheckpoint(path, weight_map.renames)
    loads = [
        ParameterImport(name, param, *find_rule(weight_map.rules, name, checkpoint.files), *_place(name))
        for chunk in chunks
        for name, param in named_global_weights(chunk)
    ]
    for load in loads:
        load.check(checkpoint)
    _check_all_used(checkpoint, {key for load in loads for key in load.keys}, weight_map)
    quiet = QUIET in os.environ or dist.get_rank() > 0 or None  # None: where there is no terminal
    with ThreadPoolExecutor(READERS, initializer=use_device, initargs=(device(),)) as readers:
        steps = readers.map(lambda load: load.run(checkpoint), loads)
        for _ in tqdm(steps, "import", len(loads), unit="tensor", disable=quiet, leave=False):
            watchdog.beat()


@dataclass(frozen=True)
class ParameterImport:
    """One parameter, and the HF tensors that fill it."""

    name: str
    param: Tensor
    rule: Rule
    keys: list[str]
    rank: int  # among the ranks that share this weight
    size: int

    def check(self, checkpoint: HFCheckpoint) -> None:
        for key, needed in zip(self.keys, self.rule.hf_shapes(self.param, self.size), strict=True):
            shapes = f"{tuple(needed)}, of which {self.name} is {tuple(self.param.shape)} at tp {self.size}"
            if key not in checkpoint.files:
                raise ValueError(
                    f"{checkpoint.folder}: lacks {key!r}: {shapes}; is the download complete, and does a "
                    f"name such as {min(checkpoint.files, default='')} begin as the hub's do?"
                )
            stored = checkpoint.shape(key)
            if not self.rule.fits(stored, needed):
                raise ValueError(
                    f"{checkpoint.folder}: {key!r} is {tuple(stored)} and must be {shapes}; "
                    "do config.json and weights belong together?"
                )

    @torch.no_grad()
    def run(self, checkpoint: HFCheckpoint) -> None:
        sources = self.rule.sources(self.name, [checkpoint.slices(key) for key in self.keys])
        self.rule.operation.load(self.param, sources, self.rank, self.size)
        del sources
        checkpoint.release(self.param.nbytes * self.size)
        if not self.param.sum(dtype=torch.float32).isfinite():
            raise ValueError(
                f"{checkpoint.folder}: {', '.join(map(repr, self.keys[:3]))} holds values that are not "
                "finite; nothing can be trained from them: download it again, or take an earlier checkpoint."
            )


def _place(name: str) -> tuple[int, int]:
    """(rank, size) in the group over which this weight is cut; experts are never cut."""
    if EXPERT.search(name):
        return 0, 1
    group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size()


def _check_all_used(checkpoint: HFCheckpoint, used: set[str], weight_map: WeightMap) -> None:
    """Raises unless every key has a place on some rank, or the map says why not. Collective."""
    keys = sorted(checkpoint.files)
    is_used = torch.tensor([key in used for key in keys], dtype=torch.uint8)
    dist.all_reduce(is_used, dist.ReduceOp.MAX)
    unused = [key for key, somewhere in zip(keys, is_used.tolist(), strict=True) if not somewhere]
    if unknown := [key for key in unused if not weight_map.carries(key)]:
        some = ", ".join(f"{key!r} {tuple(checkpoint.shape(key))}" for key in unknown[:5])
        raise ValueError(
            f"{checkpoint.folder}: {len(unknown)} keys that this {weight_map.model_type} does not have, "
            f"such as {some}; importing would lose them"
        )
