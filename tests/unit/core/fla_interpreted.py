"""The check of flash-linear-attention's kernels in Triton's interpreter, on a CPU, in a dtype."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator

import numpy as np
import torch
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

tune, dot = Autotuner.__init__, InterpreterBuilder.create_dot


def with_one(self, function, names, configs, *given, **named) -> None:
    """An autotuner of one configuration, as there is no card to choose by."""
    tune(self, function, names, configs[:1], *given, **named)


def loop(*bounds) -> Iterator:
    """`range` of a kernel: the interpreter's counts in integers of Python, which have no `.to`."""
    for i in builtins.range(*map(int, bounds)):
        yield tl.full((), i, tl.int32)


def wide(x: TensorHandle) -> TensorHandle:
    """bf16, which the interpreter keeps as integers of 16 bits and multiplies as such, in fp32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def product(self, a: TensorHandle, b: TensorHandle, *given) -> TensorHandle:
    return dot(self, wide(a), wide(b), *given)


Autotuner.__init__ = with_one
InterpreterBuilder.create_dot = product

import fla.ops.common.chunk_delta_h as states  # noqa: E402

from megatron_vlm.models.layers.attention_sizes import DeltaHeads  # noqa: E402
from megatron_vlm.models.layers.delta_net import installed_kernels  # noqa: E402
from megatron_vlm.models.layers.delta_rule import Documents  # noqa: E402
from megatron_vlm.models.layers.kernel_checks import delta_disagreement  # noqa: E402

states.range = loop
documents = Documents(np.array([5, 1, 70, 64, 20]), torch.device("cpu"))
print(
    delta_disagreement(
        installed_kernels(), DeltaHeads(2, 6, 16, 32, 4), documents, getattr(torch, sys.argv[1])
    )
)
