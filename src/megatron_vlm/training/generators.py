"""The random generators of a rank as plain data."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def generator_states() -> dict[str, Any]:
    """The states of python, numpy, torch, the device and Megatron's tracker, as JSON data."""
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


def restore_generators(rng: dict[str, Any]) -> None:
    """Set all generators to the states that `generator_states` returned."""
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
