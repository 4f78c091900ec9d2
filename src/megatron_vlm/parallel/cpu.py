"""Megatron-Core on a machine without CUDA: gloo, CPU tensors, no Transformer Engine, no Apex.

Megatron-Core asks for CUDA by name in many places. `install()` answers them all here; these are the package's
only changes to Megatron. `models`, `training` and `parallel.setup` call it when they are imported.
Checked against Megatron-Core 0.19 and torch 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Let Megatron-Core run on CPU. Does nothing if CUDA is present, or when called again.

    Imports Megatron-Core, about 5 s. Call it before anything else imports `megatron.core`: then nothing
    imports torch's compiler, and the import is twice as fast. After such an import it works too, but has to
    turn `torch.compile` off for the whole process.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _import_megatron_without_compiler()
    _redirect_factories()
    _redirect_tensor_methods()
    _answer_cuda_module()
    _keep_rng_on_cpu()
    _split_sizes_as_ints()
    _pad_uneven_collectives()


def _import_megatron_without_compiler() -> None:
    """Imports Megatron with a `jit_fuser` other than `torch.compile`, which on CPU compiles C++ at a call."""
    if "megatron.core" in sys.modules:
        torch.compiler.set_stance("force_eager")
        return
    compile_ = torch.compile
    torch.compile = lambda fn=None, **_: fn if fn is not None else (lambda inner: inner)
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compile_
    importlib.import_module("megatron.core.jit").disable_jit_fuser()


def _is_cuda(device) -> bool:
    """Whether `device` names CUDA in one of torch's spellings; a bare index counts as CUDA."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint "
    "randn randn_like tensor zeros zeros_like"
).split()


def _redirect_factories() -> None:
    """Makes `torch.empty(..., device="cuda")` and the like allocate on the CPU.

    It wraps functions, because a TorchFunctionMode is not active inside autograd's backward.
    """
    _device_constructors()  # caches the originals; `with torch.device(...)` recognizes factories by them
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))


def _with_cpu_device(factory):
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return on_cpu


class _TypeName(str):
    """A CPU tensor's type name, which also equals its CUDA name."""

    def __eq__(self, other):
        return str.__eq__(self, other) or str.__eq__(self.replace("torch.", "torch.cuda.", 1), other)

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _redirect_tensor_methods() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(tensor_to)
    def to(self, *args, **kwargs):
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return tensor_to(self, *args, **kwargs)

    @functools.wraps(tensor_type)
    def type_(self, *args, **kwargs):
        name = tensor_type(self, *args, **kwargs)
        return _TypeName(name) if isinstance(name, str) else name

    torch.Tensor.to = to  # `weight.to(device=torch.cuda.current_device())` of the MoE router and others
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # tied embeddings, optimizer state
    torch.Tensor.type = type_  # the optimizers and clip_grads compare with "torch.cuda.FloatTensor"


class _Stream:
    """Stands in for a stream or an event: work on the CPU is done when the call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, *args) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def _nothing(self, *args) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing


def _answer_cuda_module() -> None:
    """Replaces functions of torch.cuda, each name with a function of its own: torch's compiler, which
    torch.optim imports, refuses one function under two names."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU  # `device=torch.cuda.current_device()` everywhere
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None  # pipeline communication, checkpoint writer
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _Stream  # MoE dispatcher, shared experts, DDP
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _keep_rng_on_cpu() -> None:
    """Gives Megatron's RNG tracker and activation recomputation the CPU generator instead of CUDA's."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(device=None, clone=False, graph_safe=False):
        return torch.random.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.random.set_rng_state(state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
    torch.cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.random.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    # The tracker warns if the CPU generator moved inside `fork`; here it is the generator that it forks.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.msg)


def _split_sizes_as_ints() -> None:
    """Turns split sizes into the ints that gloo needs: the MoE dispatcher only does so for CUDA tensors."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def on_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = on_host


def _pad_uneven_collectives() -> None:
    """Pads lists of tensors of different lengths, which gloo refuses: expert tokens under TP x EP.

    Each tensor is padded along its first axis to the longest of its list; all ranks know all lengths.
    """
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def padded_all_gather(tensor_list, tensor, group=None, async_op=False):
        if _same_length(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "uneven all_gather on gloo is synchronous"
        longest = max(len(t) for t in tensor_list)
        gathered = [_padded(t, longest) for t in tensor_list]
        all_gather(gathered, _padded(tensor, longest), group=group)
        for out, full in zip(tensor_list, gathered, strict=True):
            out.copy_(full[: len(out)])

    @functools.wraps(reduce_scatter)
    def padded_reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _same_length(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        assert not async_op, "uneven reduce_scatter on gloo is synchronous"
        longest = max(len(t) for t in input_list)
        full = _padded(output, longest)
        reduce_scatter(full, [_padded(t, longest) for t in input_list], op=op, group=group)
        output.copy_(full[: len(output)])

    dist.all_gather, dist.reduce_scatter = padded_all_gather, padded_reduce_scatter


def _same_length(tensors) -> bool:
    return len({t.shape[:1] for t in tensors}) == 1


def _padded(tensor, length: int):
    padding = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, padding])
