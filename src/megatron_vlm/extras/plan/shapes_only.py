"""Functions of torch that know nothing of `meta` do on shapes, during a rehearsal, as they do on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import adam

from megatron_vlm.extras.plan.recorder import Recorder
from megatron_vlm.models.layers.kernels.fused import Fused

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@contextmanager
def shapes_only(recorder: Recorder) -> Iterator[None]:
    """Inside, attention is one kernel and does not store all scores; dropout is one and stores a byte for
    each number; fused functions are compiled; a tensor is made on the host and copied, and one made from
    numbers of the device reads each; Adam may be fused; memory can be pinned; who synchronizes waits. Objects
    that ranks exchange are all this rank's own."""
    changed = (
        *((functional, name) for name in ("scaled_dot_product_attention", "dropout")),
        *((torch, "tensor"), (torch.Tensor, "pin_memory"), (adam, "_device_dtype_check_for_fused")),
        *((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize")),
        *((dist, name) for name in ("all_gather_object", "broadcast_object_list")),
        *((Fused, name) for name in ("compiles_on", "compiled")),
    )
    before = [getattr_static(owner, name) for owner, name in changed]
    on_host = torch.tensor

    def copied(data: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None:
            return on_host(_numbers(data), **options)
        return on_host(_numbers(data), device="cpu", **options).to(device)

    functional.scaled_dot_product_attention = _one_kernel
    functional.dropout = _dropped
    torch.tensor = copied
    torch.Tensor.pin_memory = lambda tensor, *_: recorder.pin(tensor)
    torch.cuda.synchronize = torch.cuda.Stream.synchronize = lambda *_: recorder.wait()
    adam._device_dtype_check_for_fused = lambda *_, **__: None
    Fused.compiles_on = "meta"
    Fused.compiled = property(lambda function: partial(recorder.as_one, function))
    dist.all_gather_object = _gathered
    dist.broadcast_object_list = lambda *_, **__: None
    try:
        yield
    finally:
        for (owner, name), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def _one_kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_) -> Tensor:
    return KERNEL(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(one) for one in data]
    return data.item() if isinstance(data, Tensor) and data.is_meta else data


def _gathered(values: list, value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)
