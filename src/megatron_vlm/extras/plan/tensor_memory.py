"""The bytes of tensors that are alive while code runs, on any device, fake tensors included."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts the storages that operations inside `with` make, until they are freed; those on devices of type
    `device` alone, if it is given.

    `peak` is the most bytes that were alive at a time. What an operation holds only while it runs is not
    seen.
    """

    def __init__(self, device: str | None = None):
        super().__init__()
        self.alive = self.peak = 0
        self._device = device
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count_all(out)
        return out

    def count_all(self, out: Any) -> None:
        """Counts all tensors of what an operation returned."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or self._device not in (None, tensor.device.type):
            return
        self._sizes[key] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)
