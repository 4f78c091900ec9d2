"""Gated delta nets by flash-linear-attention's kernels against plain PyTorch, and their speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from gpu_check.clock import both_ways
from gpu_check.rows import Row
from gpu_check.sizes import DTYPE, ON_CUDA, About, Sizes
from megatron_vlm.models.layers.attention_sizes import DeltaHeads
from megatron_vlm.models.layers.delta_net import Kernels, installed_kernels
from megatron_vlm.models.layers.delta_rule import Documents
from megatron_vlm.models.layers.kernel_checks import delta_cases, delta_disagreement
from megatron_vlm.parallel import setup


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """On a CPU with the stand-in of the tests, which takes each document alone."""
    if ON_CUDA:
        by = installed_kernels()
    else:
        from fla_stand_in import STAND_IN as by
    if by is None:
        yield Row("delta_nets", "flash-linear-attention, whose kernels are to be compared", "not installed")
        return
    documents = Documents(np.array(sizes.delta_documents), setup.device())
    for keys, values in sizes.delta_heads:
        heads = DeltaHeads(keys, values, sizes.delta_channels, sizes.delta_channels, 4)
        case = f"{keys} heads of keys, {values} of values, {sizes.delta_channels} wide"
        problem = delta_disagreement(by, heads, documents, DTYPE)
        what = f"kernels against plain PyTorch, {case}"
        yield Row("delta_nets", f"{what}: {problem}" if problem else what, float(problem is not None), 0)
        if not problem:
            yield from speed(sizes, case, heads, documents, by)


def speed(sizes: Sizes, case: str, heads: DeltaHeads, documents: Documents, by: Kernels) -> Iterator[Row]:
    on = "" if ON_CUDA else " on a CPU"
    for name, function, tensors in delta_cases(heads, documents, DTYPE):
        took, plain = (
            both_ways(sizes, partial(function, documents=documents, by=each), *tensors[:-1])
            for each in (by, None)
        )
        tokens = int(documents.lengths.sum())
        yield Row("delta_nets", f"{name}, {case}, {tokens} tokens{on}, milliseconds", 1000 * took)
        yield Row("delta_nets", f"{name}, {case}, plain PyTorch over kernels, times", plain / took)
