"""Records what a rank's device would hold and exchange while code runs on `meta`, on shapes without numbers.

The host is real: index lists, grids and plans are computed. A device that is asked for numbers has none, so
each read is answered by what `Recorder._answer` says.
"""

import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_vlm.models.layers.attention_kernels import flash_kernel_backward, most_workspace
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.linears import STAND_INS, gathered_product

META = torch.device("meta")
aten = torch.ops.aten


class Collective(NamedTuple):
    """A call in which ranks exchange data. What a pipeline stage receives is another's send."""

    group: str  # "tp", "cp", "dp", "ep", "pp", "tp cp" or "all"
    kind: str
    nbytes: int  # of the largest side: what is reduced, gathered, sent


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
            if not isinstance(tensor, Tensor) or self._device not in (None, tensor.device.type):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            nbytes = storage.nbytes()
            if key not in self._sizes:
                self._sizes[key] = 0
                weakref.finalize(storage, self._free, key)
            self.alive += nbytes - self._sizes[key]  # storages can be resized
            self._sizes[key] = nbytes
            self.peak = max(self.peak, self.alive)

    def _free(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)


class Recorder(TensorMemory):
    """Counts what is exchanged on `meta` inside `with`, in `seen`, which its user may replace."""

    def __init__(self):
        super().__init__("meta")
        self.seen: Counter[Collective] = Counter()
        self._routed = 0  # (token, expert) pairs of this rank that a layer counted last
        self._false = WeakTensorKeyDictionary()  # results of comparisons, see `_answer`
        self._labels = _labels()
        self._symmetric = torch.empty(0, device="cpu")  # memory in which products exchange rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._exchange(func, args, kwargs)
        if func in STAND_INS:
            return self._exchanging_product(func, args, kwargs)
        if torch.is_inference_mode_enabled():  # what is made of other operations comes whole
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        read = on_device((args, kwargs))
        if read and (func is aten._local_scalar_dense.default or is_copy_to_host(func, kwargs)):
            return self._answer(args[0], scalar=func is aten._local_scalar_dense.default)
        if read and func is aten.copy_.default and not args[0].is_meta:
            return args[0].copy_(self._answer(args[1], scalar=False))
        workspace = None
        if func is flash_kernel_backward:
            nbytes = most_workspace(args[1].shape, args[2].shape, len(args[6]) - 1, args[8:10])
            workspace = torch.empty(nbytes, dtype=torch.uint8, device=META)
            self.count_all(workspace)  # it is there until the results are
        # what returns nothing only changes numbers, of which there are none (a fused Adam)
        out = func(*args, **kwargs) if func._schema.returns else None
        self.count_all(out)
        if func is aten.scatter_add_.default and out.is_meta and not out.is_floating_point():
            self._routed = args[3].numel()
        if func is aten.ne.Tensor:
            self._false[out] = True
        return out

    def _exchanging_product(self, func, args, kwargs):
        """Counts an operator of `parallel.linears` as it works on CUDA.

        There a buffer has the rows of all ranks, and others fetch theirs from memory that it keeps.
        """
        out = STAND_INS[func](*args, **kwargs)
        self.count_all(out)
        group = _resolve_process_group(args[-1])
        gathers = func is gathered_product
        kind, rows = ("allgather_base", args[0]) if gathers else ("reduce_scatter_base", out)
        self.seen[Collective("tp", kind, group.size() * rows.nbytes)] += 1
        self.count_all(torch.empty(group.size() * rows.nbytes, dtype=torch.uint8, device=META))
        if (needed := rows.nbytes * (1 if gathers else 2)) > self._symmetric.nbytes:
            self._symmetric = torch.empty(needed, dtype=torch.uint8, device=META)
            self.count_all(self._symmetric)
        return out

    def _exchange(self, func, args, kwargs):
        names = [argument.name for argument in func._schema.arguments]
        sides = [sum(t.nbytes for t in on_device(side)) for side in args]
        group = ProcessGroup.unbox(args[names.index("process_group")])
        if max(sides) and group.size() > 1 and not func.__name__.startswith("recv"):
            kind = func.__name__.split(".")[0].strip("_")
            label = self._labels.get(group.group_name, "all")
            self.seen[Collective(label, kind, max(sides))] += 1
        return FakeWork().boxed() if "coalesced" in func.__name__ else func(*args, **kwargs)

    def _answer(self, tensor: Tensor, scalar: bool) -> Any:
        """Numbers that a device would have to compute. Rows of whole numbers are how many tokens a layer with
        experts sends where, or receives: an even split. Nothing differs from what it is compared with: Adam's
        steps of parameters are equal. All else, such as a loss or a norm, is one."""
        if scalar:
            if tensor in self._false:
                return False
            return torch.ones((), dtype=tensor.dtype, device="cpu").item()
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool or not tensor.dim():
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        share, more = divmod(self._routed, tensor.shape[-1])
        split = torch.full(tensor.shape, share, dtype=tensor.dtype, device="cpu")
        split[..., :more] += 1
        return split


def on_device(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_meta]


def is_copy_to_host(func, kwargs: dict) -> bool:
    return func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")


def _labels() -> dict[str, str]:
    """Labels of the groups of Megatron that are not of all ranks, by their names."""
    ps = setup.parallel_state
    groups = (
        ("tp cp", ps.get_tensor_and_context_parallel_group()),
        ("tp", ps.get_tensor_model_parallel_group()),
        ("cp", ps.get_context_parallel_group()),
        ("dp", ps.get_data_parallel_group()),
        ("dp", ps.get_data_parallel_group(with_context_parallel=True)),
        ("dp", ps.get_expert_data_parallel_group()),
        ("ep", ps.get_expert_model_parallel_group()),
        ("pp", ps.get_pipeline_model_parallel_group()),
        ("pp", ps.get_embedding_group(check_initialized=False)),
    )
    return {group.group_name: label for label, group in groups if group is not None}
