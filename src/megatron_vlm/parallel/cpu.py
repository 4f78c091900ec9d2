"""Megatron-Core on a machine without CUDA: gloo, CPU tensors, no Transformer Engine, no Apex.

Megatron-Core asks for CUDA by name in many places, and `install()` answers them all. `models`, `training` and
`parallel.setup` call it on import. docs/design/architecture.md lists all changes to other packages.
Checked against Megatron-Core 0.19 and torch 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron_vlm.files import read_file

_installed = False
_device = torch.device("cpu")  # what "cuda" means here


def device() -> torch.device:
    """The device that stands in for CUDA."""
    return _device


@contextlib.contextmanager
def stand_in(other: torch.device) -> Iterator[None]:
    """Inside, "cuda" means `other`. On `meta`, all that a GPU would hold has a shape and no numbers, while
    what stays on the host is real: so the real code can be run at any size."""
    global _device
    assert _installed, "CUDA itself is here"
    before, _device = _device, other
    try:
        yield
    finally:
        _device = before


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


def threads() -> int:
    """Return the user's OMP_NUM_THREADS, else this process's share of the cores.

    Sums are split by threads, so bits depend on this number.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested) and not (requested == "1" and _is_torchruns_own()):
        return int(requested)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _is_torchruns_own() -> bool:
    """Whether torchrun set OMP_NUM_THREADS=1 for several processes, and not its user: /proc keeps the
    environment with which torchrun itself, our parent, was started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return False
    try:
        return b"OMP_NUM_THREADS=" not in read_file(f"/proc/{os.getppid()}/environ", 1 << 24)
    except OSError:
        return True


def resume_threads(saved: Sequence[int]) -> str:
    """Compute with the number of threads that this rank had when a checkpoint was saved; `saved` has one for
    each rank, or none.

    Returns a line for the log; empty if the number stays the same.
    """
    usual = torch.get_num_threads()
    if torch.cuda.is_available() or not saved or saved[dist.get_rank()] == usual:
        return ""
    count = saved[dist.get_rank()]
    torch.set_num_threads(count)
    if (number := torch.get_num_threads()) != count:
        return f"threads: the checkpoint has {count}, torch takes {number}; bits may differ from here on"
    return f"threads: {count}, as the checkpoint has them, so that bits stay the same; usual here: {usual}"


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


# What Megatron-Core calls with the literal "cuda". Elsewhere it asks `torch.cuda.current_device()`, which
# answers with the device that stands in, so that the other functions need no change.
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


def _redirect_factories() -> None:
    """Makes `torch.zeros(..., device="cuda")` and the like allocate on the device that stands in.

    It wraps functions, because a TorchFunctionMode is not active inside autograd's backward.
    """
    _device_constructors()  # caches the originals; `with torch.device(...)` recognizes factories by them
    for name in _FACTORIES:
        setattr(torch, name, _with_other_device(getattr(torch, name)))


def _with_other_device(factory):
    @functools.wraps(factory)
    def elsewhere(*args, device=None, **kwargs):
        return factory(*args, device=_device if device == "cuda" else device, **kwargs)

    return elsewhere


class _TypeName(str):
    """A tensor's type name on the CPU, which also equals its CUDA name."""

    def __eq__(self, other):
        return str.__eq__(self, other) or str.__eq__(self.replace("torch.", "torch.cuda.", 1), other)

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _redirect_tensor_methods() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(tensor_type)
    def type_(self, *args, **kwargs):
        name = tensor_type(self, *args, **kwargs)
        return _TypeName(name.replace(".meta.", ".")) if isinstance(name, str) else name

    # tied embeddings, optimizer state; what has a shape alone stays so
    torch.Tensor.cuda = lambda self, *_, **__: self if self.is_meta else tensor_to(self, _device)
    torch.Tensor.type = type_  # the optimizers and clip_grads compare with "torch.cuda.FloatTensor"
    torch.Tensor.pin_memory = lambda self, *_: self  # nothing is copied from it


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
    cuda.current_device = device  # `device=torch.cuda.current_device()` everywhere
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None  # pipeline communication, checkpoint writer
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _Stream  # shared experts, DDP
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _keep_rng_on_cpu() -> None:
    """Gives Megatron's RNG tracker and activation recomputation the CPU generator instead of CUDA's."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.random.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)
    torch.cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.random.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    # The tracker warns if the CPU generator moved inside `fork`; here it is the generator that it forks.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.msg)
