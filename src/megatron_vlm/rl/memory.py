"""Weights, optimizer state and gradients of a policy in host memory, while an engine has the device.

What is moved are whole storages: their bytes are copied, and the device's memory is released in place. So
Megatron's many views into its buffers stay what they are: parameters, main gradients, a rank's share of the
optimizer. Megatron 0.19's own helpers give tensors new memory, which an fp32 optimizer's views then miss.
"""

from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from megatron_vlm.parallel import setup

MODEL, OPTIMIZER, GRADS = KINDS = ("model", "optimizer", "grads")
SMALLEST, LARGEST = 2**20, 2**28  # bytes of a part of pinned memory


class Memory:
    """The memory of a policy by kind: `model`, `optimizer`, `grads`; each on the device or away."""

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer):
        self._chunks, self._optimizer = chunks, optimizer
        # of each kind that is away: storage, its size, its bytes on the host in pieces; None: all are zero
        self._away: dict[str, list[tuple[UntypedStorage, int, list[Tensor] | None]]] = {}

    def offload(self, kind: str) -> None:
        """Copies all of a kind to the host and releases its memory. Gradients that are zero are not kept."""
        if kind in self._away:
            return
        self._away[kind] = moved = []
        for storage in self._storages(kind):
            size, storage_bytes = storage.nbytes(), _bytes(storage)
            host = None
            if kind != GRADS or storage_bytes.any():
                pins = storage.device.type == "cuda"
                host = [
                    torch.empty(len(part), dtype=torch.uint8, pin_memory=pins).copy_(part)
                    for part in storage_bytes.split(pieces(size))
                ]
            storage.resize_(0)
            moved.append((storage, size, host))
        if setup.device().type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, kind: str) -> None:
        """Brings a kind back as it was, to the bit."""
        for storage, size, host in self._away.pop(kind, ()):
            storage.resize_(size)
            if host is None:
                _bytes(storage).zero_()
                continue
            for part, kept in zip(_bytes(storage).split(pieces(size)), host, strict=True):
                part.copy_(kept, non_blocking=True)

    def need(self, caller: str, *kinds: str) -> None:
        """Raises ValueError if one of these is away."""
        if away := [kind for kind in kinds if kind in self._away]:
            raise ValueError(
                f"{caller}: the policy is offloaded ({', '.join(away)}); first call "
                f"policy.to('cuda', {', '.join(f'{kind}={kind in away}' for kind in KINDS)})."
            )

    def _storages(self, kind: str) -> list[UntypedStorage]:
        """Each once, of the device; what the optimizer shares with the model belongs to the model."""
        modules = [chunk.module for chunk in self._chunks]
        buffers = [item for chunk in self._chunks for item in chunk.buffers + chunk.expert_parallel_buffers]
        adams = [item.optimizer for item in self._optimizer.chained_optimizers if item.optimizer is not None]
        states = [state for adam in adams for state in adam.state.values()]
        tensors = {
            MODEL: [
                *(tensor for module in modules for tensor in chain(module.parameters(), module.buffers())),
                *(item.param_data for item in buffers if item.param_data is not None),
            ],
            GRADS: [item.grad_data for item in buffers],
            OPTIMIZER: [
                *(param for adam in adams for group in adam.param_groups for param in group["params"]),
                *(item for state in states for item in state.values() if isinstance(item, Tensor)),
            ],
        }
        owned: dict[int, tuple[str, UntypedStorage]] = {}
        for owner, of_owner in tensors.items():
            for tensor in of_owner:
                storage = tensor.untyped_storage()
                if tensor.device.type == setup.device().type and storage.resizable():
                    owned.setdefault(storage._cdata, (owner, storage))
        return [storage for owner, storage in owned.values() if owner == kind]


def pieces(size: int) -> list[int]:
    """The sizes of parts of so many bytes that waste little where they are pinned: torch rounds each up to a
    power of two. So they are such powers, the largest first, and a rest of less than SMALLEST."""
    sizes: list[int] = []
    while size >= SMALLEST:
        sizes.append(min(LARGEST, 1 << size.bit_length() - 1))
        size -= sizes[-1]
    return [*sizes, size] if size else sizes


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
