"""Hugging Face weights in: every rank reads the slices that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist
from tqdm import tqdm

from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.models.weights.rules import EXPERT, Rule, find_rule, matches, named_global_weights

if TYPE_CHECKING:
    from megatron_vlm.models.families.base import Family
    from megatron_vlm.models.vlm import VLMModel


def import_hf(chunks: list[VLMModel], path: str | Path, family: Family, hf_config: Any) -> None:
    """Fill the weights of this rank's model chunks from the HF checkpoint, reading only their slices.

    Raises ValueError that names the keys when the checkpoint has one that no rule covers, lacks one that a
    parameter needs, or has one of another shape. Values are cast to the parameters' dtype.
    """
    checkpoint, rules = HFCheckpoint(path, family.renames), family.weights(hf_config)
    _check_no_unknown(checkpoint, rules, family)
    params = [pair for chunk in chunks for pair in named_global_weights(chunk)]
    for name, param in tqdm(
        params, "import", unit="tensor", disable=None if dist.get_rank() == 0 else True, leave=False
    ):
        rule, keys = find_rule(rules, name, checkpoint.files)
        rank, size = _place(name)
        if missing := [key for key in keys if key not in checkpoint.files]:
            raise ValueError(f"{checkpoint.folder}: lacks {missing}, needed for {name} {tuple(param.shape)}")
        sources = rule.sources(name, [checkpoint.slices(key) for key in keys])
        value = rule.operation.read(sources, rank, size)
        if value.shape != param.shape:
            shapes = {key: tuple(source.get_shape()) for key, source in zip(keys, sources, strict=True)}
            raise ValueError(
                f"{checkpoint.folder}: {shapes} gives {tuple(value.shape)} at tp {size} rank {rank}, but "
                f"{name} is {tuple(param.shape)}; do config.json and weights belong together?"
            )
        with torch.no_grad():
            param.copy_(value)


def _place(name: str) -> tuple[int, int]:
    """(rank, size) of the group that cuts this weight: experts are never cut."""
    if EXPERT.search(name):
        return 0, 1
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _check_no_unknown(checkpoint: HFCheckpoint, rules: list[Rule], family: Family) -> None:
    def known(key: str) -> bool:
        return any(rule.covers(key) for rule in rules) or any(
            matches(ignored, key) for ignored in family.ignored_keys
        )

    if unknown := sorted(key for key in checkpoint.files if not known(key)):
        raise ValueError(
            f"{checkpoint.folder}: {len(unknown)} keys that {family.model_type} does not have, such as "
            f"{unknown[:5]}; importing would lose them"
        )
