"""Counts where the host waits for the device while code runs on `meta`, and refuses what CUDA refuses.

A read of numbers is a wait, with its place in the code; so is a copy to the device that the host waits for,
and each `synchronize`. An operation on tensors of the host and of the device raises.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getattr_static

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_vlm.config import RunConfig
from megatron_vlm.extras.plan.recorder import META, STAND_INS, Recorder, is_copy_to_host
from megatron_vlm.extras.plan.rehearsal import on_shapes
from megatron_vlm.models.description import Description

aten = torch.ops.aten
# among tensors of a GPU, these take index lists from the host, and copy them
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# modules, and a function, whose frames are not the place of what they do
INSIDE = (
    "torch.",
    "device_waits.",
    "megatron_vlm.extras.plan.",
    "megatron_vlm.parallel.cpu.",
    "megatron_vlm.parallel.setup.on_device.",
)


class WaitRecorder(Recorder):
    """Counts in `waits`, which its user may replace, how often the host waits at each place."""

    def __init__(self):
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._pinned: set[int] = set()  # storages of the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "c10d" and func not in STAND_INS:
            self._look(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def wait(self) -> None:
        """Count that the host waits for the device here."""
        self.waits[place()] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host tensor that counts as one in pinned memory."""
        pinned = tensor.clone()
        storage = pinned.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return pinned

    def _look(self, func, args, kwargs) -> None:
        """Count a read, or a copy that the host waits for. Raise RuntimeError for what CUDA refuses."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        lists = [tensor for tensor in tensors if tensor.dim() and not tensor.is_meta]
        has_device = any(tensor.is_meta for tensor in tensors)
        mixed = bool(lists) and has_device
        if func is aten._local_scalar_dense.default or is_copy_to_host(func, kwargs):
            waits = has_device
        elif func is aten.copy_.default and not args[0].is_meta:
            waits = has_device
        elif func is aten._to_copy.default and kwargs.get("device") == META:
            is_ready = kwargs.get("non_blocking") and self._is_ready(args[0], kwargs.get("dtype"))
            waits = not (args[0].is_meta or is_ready)
        elif func is aten.copy_.default:
            is_ready = any(args[2:]) and self._is_ready(args[1], args[0].dtype)
            waits = not (args[1].is_meta or is_ready)
        else:
            waits = mixed and func in INDEXING
            if mixed and not waits:
                raise RuntimeError(
                    f"{place()}: {func} takes tensors of the device and one of the host, "
                    f"{tuple(lists[0].shape)}; a GPU would refuse it."
                )
        if waits:
            self.wait()

    def _is_ready(self, tensor: Tensor, dtype: torch.dtype | None) -> bool:
        """Whether a copy as this dtype needs nothing of the host."""
        same = dtype in (None, tensor.dtype) and tensor.is_contiguous()
        return same and tensor.untyped_storage()._cdata in self._pinned


@contextmanager
def waiting_on_shapes(
    config: RunConfig, description: Description, gpus: int, rank: int
) -> Iterator[WaitRecorder]:
    """Do as `on_shapes`, and let pinned memory count, and whoever synchronizes wait."""
    changed = ((torch.Tensor, "pin_memory"), (torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"))
    with on_shapes(config, description, gpus, rank, WaitRecorder) as recorder:
        before = [getattr_static(owner, name) for owner, name in changed]
        torch.Tensor.pin_memory = lambda tensor, *_: recorder.pin(tensor)
        torch.cuda.synchronize = torch.cuda.Stream.synchronize = lambda *_: recorder.wait()
        try:
            yield recorder
        finally:
            for (owner, name), value in zip(changed, before, strict=True):
                setattr(owner, name, value)


def place() -> str:
    """Return the file, line and function that is at work, outside of torch and of the rehearsal."""
    frame = sys._getframe(1)
    while f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}.".startswith(INSIDE):
        frame = frame.f_back
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_qualname}"
