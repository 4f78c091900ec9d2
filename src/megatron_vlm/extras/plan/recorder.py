"""Records what a rank's device would do and hold while code runs on `meta`, on shapes without numbers.

The host is real: index lists, grids and plans are computed. A device that is asked for numbers has none, so
each read is counted, with its place, and answered by what `Recorder._answer` says. So is each copy to the
device that the host would wait for, and each `synchronize`. What CUDA refuses raises here, too: an operation
on tensors of the host and of the device.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_vlm.models.layers.kernels.fused import Fused
from megatron_vlm.models.work.attention_work import ATTENTION
from megatron_vlm.parallel.overlapped import STAND_INS, gathered_product

META = torch.device("meta")
aten = torch.ops.aten
# among tensors of a GPU, these take index lists from the host, and copy them
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
STARTED = ("async_op", "asyncOp")  # an argument of collectives, by torch's version: the caller goes on
# frames that are not the place of what they do
# modules, as a folder on the way to a file may have any name
INSIDE = (
    "torch.",
    "megatron_vlm.extras.plan.",
    "megatron_vlm.parallel.cpu.",
    "megatron_vlm.parallel.transfer.",
)


class DeviceWork(NamedTuple):
    """An operation on the device."""

    kind: str  # "matmul", "attention" or "other"
    flops: float
    nbytes: int  # read and written


class Collective(NamedTuple):
    """A call in which ranks exchange data. What a pipeline stage receives is another's send."""

    group: str  # "tp", "cp", "dp", "ep", "pp", "tp cp" or "all"
    kind: str
    ranks: tuple[int, ...]  # of the group
    nbytes: int  # of the largest side: what is reduced, gathered, sent


class Overlap(NamedTuple):
    """A product and the collective that runs meanwhile; both are counted besides."""

    product: DeviceWork
    call: Collective
    pieces: int  # in which the product exchanges its rows itself; 1: a whole collective beside it


class Seen(Counter):
    """How often each DeviceWork, Collective, Overlap and place where the host waits was seen."""

    def of(self, kind: type) -> dict[Any, int]:
        """The counts of one kind, such as DeviceWork, or str for the places where the host waits."""
        return {what: count for what, count in self.items() if isinstance(what, kind)}


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


class Recorder(TensorMemory):
    """Counts what happens on `meta` inside `with`, in `seen`, which its user may replace."""

    def __init__(self):
        super().__init__("meta")
        self.seen = Seen()
        self._routed = 0  # (token, expert) pairs of this rank that a layer counted last
        # an operation on these shapes -> its work, and the shapes that it makes: many layers do the same
        self._known: dict[tuple, tuple[DeviceWork | None, Any]] = {}
        self._sent = WeakTensorKeyDictionary()  # small tensors that came from the host -> their numbers
        self._pinned: set[int] = set()  # storages of the host
        self._labels = dict(_labels())
        self._on_its_way: Collective | None = None  # started beside the product that follows
        self._in_product = False  # of those that exchange rows
        self._symmetric = torch.empty(0, device="cpu")  # memory in which products exchange rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._exchange(func, args, kwargs)
        if func in STAND_INS:
            return self._exchanging_product(func, args, kwargs)
        if (
            torch.is_inference_mode_enabled() or self._in_product
        ):  # what is made of other operations comes whole
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = [t for t in tensors if t.is_meta]
        if on_device and (func is aten._local_scalar_dense.default or _is_copy_to_host(func, kwargs)):
            self.wait()
            return self._answer(args[0], scalar=func is aten._local_scalar_dense.default)
        if on_device and func is aten.copy_.default and not args[0].is_meta:
            self.wait()
            return args[0].copy_(self._answer(args[1], scalar=False))
        if len(on_device) < len(tensors):
            self._check(func, args, kwargs, tensors)
        if not on_device:
            return self._from_host(func, args, kwargs)
        key = (func, _shape(args), _shape(tuple(kwargs.items()))) if _is_plain(func) else None
        if key in self._known:
            work, made = self._known[key]
            out = args[0] if made is None else _remade(made)
        else:
            # what returns nothing only changes numbers, of which there are none (a fused Adam)
            out = func(*args, **kwargs) if func._schema.returns else None
            work = self._work(func, args, kwargs, on_device, out)
            if key is not None:
                self._known[key] = work, None if func._schema.arguments[0].alias_info else _shape(out)
        self.count_all(out)
        if work is not None:
            self._count_work(work)
        if func is aten.scatter_add_.default and not out.is_floating_point():
            self._routed = args[3].numel()
        if func is aten.ne.Tensor:
            self._sent[out] = torch.zeros(out.shape, dtype=torch.bool, device="cpu")
        return out

    def as_one(self, function: Fused, *args: Any) -> Any:
        """Runs a fused function as it is written and counts its work as its kernels do it. What it holds
        meanwhile is counted as written: a little more than they hold."""
        outside = self.seen
        self.seen = Seen()
        out = function.written(*args)
        outside.update(self.seen.of(str))
        self.seen = outside
        nbytes = function.reads * sum(t.nbytes for t in _on_device(args))
        self.seen[DeviceWork("other", 0.0, nbytes + sum(t.nbytes for t in _on_device(out)))] += 1
        return out

    def wait(self) -> None:
        """Counts that the host waits for the device here."""
        self.seen[_place()] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor that counts as one in pinned memory."""
        pinned = tensor.clone()
        storage = pinned.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return pinned

    def _check(self, func, args, kwargs, tensors: list[Tensor]) -> None:
        """Counts a copy to the device that the host waits for. Raises RuntimeError for what CUDA refuses."""
        lists = [tensor for tensor in tensors if tensor.dim() and not tensor.is_meta]
        mixed = bool(lists) and any(tensor.is_meta for tensor in tensors)
        if func is aten._to_copy.default and kwargs.get("device") == META:
            waits = not (kwargs.get("non_blocking") and self._is_ready(args[0], kwargs.get("dtype")))
        elif func is aten.copy_.default and args[0].is_meta:
            waits = not (any(args[2:]) and self._is_ready(args[1], args[0].dtype))
        else:
            waits = mixed and func in INDEXING
            if mixed and not waits:
                raise RuntimeError(
                    f"{_place()}: {func} takes tensors of the device and one of the host, "
                    f"{tuple(lists[0].shape)}; a GPU would refuse it."
                )
        if waits:
            self.wait()

    def _is_ready(self, tensor: Tensor, dtype: torch.dtype | None) -> bool:
        """Whether a copy as this dtype needs nothing of the host."""
        same = dtype in (None, tensor.dtype) and tensor.is_contiguous()
        return same and tensor.untyped_storage()._cdata in self._pinned

    def _from_host(self, func, args, kwargs):
        """Runs an operation that makes a tensor, perhaps out of one of the host."""
        out = func(*args, **kwargs)
        self.count_all(out)
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and out.is_meta:
            self._sent[out] = args[0]
        return out

    def _work(self, func, args, kwargs, read: list[Tensor], out: Any) -> DeviceWork | None:
        """None for a view."""
        returned = [value.alias_info for value in func._schema.returns]
        if returned and all(alias and not alias.is_write for alias in returned):
            return None
        nbytes = sum(t.nbytes for t in (*read, *_on_device(out)))
        packet = func._overloadpacket
        if packet in ATTENTION:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            return DeviceWork("attention", ATTENTION[packet](self.numbers, given), nbytes)
        if packet is aten._grouped_mm:
            return DeviceWork("matmul", 2.0 * args[0].numel() * args[1].shape[-1], nbytes)
        if packet in (aten.addmm, aten.addmm_):  # without an `out_dtype`, which torch 2.11 takes for a shape
            packet, args = aten.addmm, args[:3]
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            return DeviceWork("matmul", float(flops), nbytes)
        return DeviceWork("other", 0.0, nbytes)

    def _count_work(self, work: DeviceWork) -> None:
        self.seen[work] += 1
        if work.kind == "matmul" and self._on_its_way:
            self.seen[Overlap(work, self._on_its_way, pieces=1)] += 1
            self._on_its_way = None

    def _exchanging_product(self, func, args, kwargs):
        """Counts an operator of `parallel.overlapped` as it works on CUDA: besides the product it copies rows
        that others fetch, or adds up those that it fetched, in memory that it keeps."""
        outside, self.seen, self._in_product = self.seen, Seen(), True
        with self:
            out = STAND_INS[func](*args, **kwargs)
        self._in_product = False
        [product] = [work for work in self.seen.of(DeviceWork) if work.kind == "matmul"]
        self.seen = outside
        group = _resolve_process_group(args[-1])
        gathers = func is gathered_product
        kind, rows = ("allgather_base", args[0]) if gathers else ("reduce_scatter_base", out)
        call = Collective("tp", kind, tuple(dist.get_process_group_ranks(group)), group.size() * rows.nbytes)
        moved = 2 * rows.nbytes if gathers else call.nbytes + rows.nbytes
        self.seen.update(
            [product, DeviceWork("other", 0.0, moved), call, Overlap(product, call, group.size())]
        )
        if (needed := rows.nbytes * (1 if gathers else 2)) > self._symmetric.nbytes:
            self._symmetric = torch.empty(needed, dtype=torch.uint8, device=META)
            self.count_all(self._symmetric)
        return out

    def _exchange(self, func, args, kwargs):
        names = [argument.name for argument in func._schema.arguments]
        sides = [sum(t.nbytes for t in _on_device(side)) for side in args]
        group = ProcessGroup.unbox(args[names.index("process_group")])
        if max(sides) and group.size() > 1 and not func.__name__.startswith("recv"):
            kind = func.__name__.split(".")[0].strip("_")
            ranks = tuple(dist.get_process_group_ranks(group))
            label = self._labels.get(group.group_name, "all")
            call = Collective(label, kind, ranks, max(sides))
            self.seen[call] += 1
            # Megatron's linears start these beside the next product, and wait for them after it
            given = dict(zip(names, args, strict=False))
            beside = any(given.get(flag, True) for flag in STARTED if flag in names)
            self._on_its_way = call if beside and label == "tp" else None
        return FakeWork().boxed() if "coalesced" in func.__name__ else func(*args, **kwargs)

    def _answer(self, tensor: Tensor, scalar: bool) -> Any:
        """Numbers that a device would have to compute. Rows of whole numbers are how many tokens a layer with
        experts sends where, or receives: an even split. Nothing differs from what it is compared with: Adam's
        steps of parameters are equal. All else, such as a loss or a norm, is one."""
        if scalar:
            if tensor.dtype == torch.bool and tensor in self._sent:
                return self._sent[tensor].item()
            return torch.ones((), dtype=tensor.dtype, device="cpu").item()
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool or not tensor.dim():
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        share, more = divmod(self._routed, tensor.shape[-1])
        split = torch.full(tensor.shape, share, dtype=tensor.dtype, device="cpu")
        split[..., :more] += 1
        return split

    def numbers(self, tensor: Tensor) -> list[int]:
        """The numbers that the host put into a tensor."""
        return self._sent[tensor].tolist()


def _on_device(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_meta]


@cache
def _is_plain(func: torch._ops.OpOverload) -> bool:
    """Whether shapes alone say all about an operation: it makes new tensors, or changes its first one."""
    schema = func._schema
    if func._overloadpacket in ATTENTION or not schema.returns or not schema.arguments:
        return False
    first, *others = schema.arguments
    if any(argument.alias_info for argument in others):
        return False
    is_new = not first.alias_info and not any(value.alias_info for value in schema.returns)
    return is_new or torch.Tag.pointwise in func.tags


def _shape(value: Any) -> Any:
    """The value with a description of each tensor in its place; it can be hashed."""
    if isinstance(value, Tensor):
        return _Shape(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return (float, value) if isinstance(value, float) else value  # 0.0 and 0 promote a type differently


class _Shape(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _remade(shape: Any) -> Any:
    if isinstance(shape, _Shape):
        return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=shape.device)
    return tuple(map(_remade, shape)) if isinstance(shape, tuple) else shape


def _is_copy_to_host(func, kwargs: dict) -> bool:
    return func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")


def _place() -> str:
    """The file, line and function that is at work, outside of torch and of this folder."""
    frame = sys._getframe(1)
    while f"{frame.f_globals.get('__name__')}.".startswith(INSIDE):
        frame = frame.f_back
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_qualname}"


def _labels() -> Iterator[tuple[str, str]]:
    """(name, label) of the groups of Megatron that are not of all ranks."""
    ps = parallel_state
    groups = {
        "tp cp": [ps.get_tensor_and_context_parallel_group()],
        "tp": [ps.get_tensor_model_parallel_group()],
        "cp": [ps.get_context_parallel_group()],
        "dp": [
            ps.get_data_parallel_group(),
            ps.get_data_parallel_group(with_context_parallel=True),
            ps.get_expert_data_parallel_group(),
        ],
        "ep": [ps.get_expert_model_parallel_group()],
        "pp": [ps.get_pipeline_model_parallel_group(), ps.get_embedding_group(check_initialized=False)],
    }
    return (
        (group.group_name, label) for label, those in groups.items() for group in those if group is not None
    )
