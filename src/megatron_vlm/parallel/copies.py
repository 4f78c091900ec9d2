"""Copies from the host to the device beside the model's work."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vlm.parallel.setup import device


class HostToDevice:
    """Copies to this process's device on a stream of their own. On CUDA it has not run yet."""

    def __init__(self):
        self._device = device()
        self._on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream() if self._on_cuda else None

    def done(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device, when they have arrived there; only the calling thread waits."""
        if not self._on_cuda:
            return tensors
        torch.cuda.set_device(self._device)  # each thread has its own
        reader = torch.cuda.default_stream()
        with torch.cuda.stream(self._stream):
            copies = {name: t.pin_memory().to(self._device, non_blocking=True) for name, t in tensors.items()}
        self._stream.synchronize()
        for copy in copies.values():
            copy.record_stream(reader)
        return copies
