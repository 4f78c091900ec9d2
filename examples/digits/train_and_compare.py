"""Trains as `megatron-vlm train` does, and says which of the model's tensors have changed, to the bit.

    torchrun --nproc_per_node 2 train_and_compare.py --recipe gemma3_tiny_digits run_dir=runs/l adapter.r=16

Each process writes the names of its tensors to weights_RANK.json in the run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from megatron_vlm import cli
from megatron_vlm.cli import run, single
from megatron_vlm.config import RunConfig
from megatron_vlm.training import loop as story

train, starting_model, started = story.train, story.starting_model, []


def starting_and_kept(*arguments) -> list[Module]:
    """The model as training takes it over; it is kept, with a digest of each tensor."""
    model = starting_model(*arguments)
    started.append((model, digests(model)))
    return model


def train_and_compare(config: RunConfig, *arguments) -> None:
    train(config, *arguments)
    [(model, before)] = started
    after, found = digests(model), {"equal": [], "changed": []}
    for name, known in before.items():
        found["equal" if after[name] == known else "changed"].append(name)
    Path(config.run_dir, f"weights_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def digests(model: list[Module]) -> dict[str, str]:
    return {
        f"{number}.{name}": digest(tensor)
        for number, chunk in enumerate(model)
        for name, tensor in chunk.module.named_parameters()
    }


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    # `train` returns nothing, so the model is taken where it is made
    story.starting_model, story.train = starting_and_kept, train_and_compare
    run(single(cli.train), "train_and_compare.py")
