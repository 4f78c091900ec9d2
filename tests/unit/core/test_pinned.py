"""Pinned memory takes hardly more than the tensors in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatron_vlm.models.hf import load_config
from megatron_vlm.parallel import pinned
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.training import optimizer

EMPTY = torch.empty


class CudaShape(NamedTuple):
    """As much of a tensor on a card as is asked for."""

    shape: torch.Size
    nbytes: int
    dtype: torch.dtype = torch.float32
    is_meta: bool = False


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """The bytes of each block as torch's allocator rounds them; nothing is allocated."""
    blocks: list[int] = []

    def empty(size, *, dtype, pin_memory=False, device=None):
        tensor = EMPTY(size, dtype=dtype, device="meta")
        blocks.append(1 << (tensor.nbytes - 1).bit_length() if pin_memory else tensor.nbytes)
        return tensor

    for module in (pinned, optimizer):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return blocks


@pytest.mark.parametrize("name", ["qwen25_vl_7b", "qwen3_vl_8b", "internvl35_1b"])
def test_adams_numbers_waste_little(taken, name):
    """Each for itself, those of Qwen2.5-VL-7B would take 1.88 of their bytes: most have 259 MiB."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(load_config(CONFIGS / f"{name}.json"))
    params = [CudaShape(p.shape, 4 * p.numel()) for p in model.parameters()]
    tensors = optimizer._on_host([param for param in params for _ in optimizer.KEPT])
    assert [tensor.shape for tensor in tensors[::3]] == [param.shape for param in params]
    assert sum(taken) <= 1.05 * sum(tensor.nbytes for tensor in tensors)


def test_tensors_have_memory_of_their_own():
    shapes = [(3, 5), (), (0, 4), (1000,), (7,), (1000, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bfloat16]
    likes = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensors = pinned.host_tensors(likes, pinned=False)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape, dtype) in enumerate(zip(tensors, shapes, dtypes, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype) and (tensor == number).all()
    assert pinned.host_tensors([], pinned=True) == []
