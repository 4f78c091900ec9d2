"""Batches and samples that a test saves for the ranks that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_vlm.batch import GenericVisualInputs


def read(file: str | Path) -> Any:
    """Tensors, plain values, and the visual inputs of batches."""
    with torch.serialization.safe_globals([GenericVisualInputs]):
        return torch.load(file, weights_only=True)
