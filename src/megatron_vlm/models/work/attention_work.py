"""The operations of calls of attention: torch's own formulas count all pairs of a batch, a segment has few.

A function takes the call's arguments by name, and what gives the numbers that the host put into a tensor.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten
Numbers = Callable[[Tensor], list[int]]
Work = Callable[[Numbers, dict[str, Any]], float]


def _segments(numbers: Numbers, given: dict[str, Any]) -> float:
    queries = np.diff(numbers(given["cum_seq_q"]))
    keys = np.diff(numbers(given["cum_seq_k"]))
    left = given["window_size_left"]
    right = given["window_size_right"]
    pairs = sum(_pairs(n, m, left, right) for n, m in zip(queries.tolist(), keys.tolist(), strict=True))
    return 4.0 * given["query"].shape[1] * given["query"].shape[2] * pairs


def _pairs(queries: int, keys: int, left: int, right: int) -> float:
    """Pairs of a segment, see `models.layers.kernels.attention`; -1: no limit."""
    if right < 0:
        return queries * keys if left < 0 else queries * (queries + 1) / 2
    limit = keys if left < 0 else min(left + 1, keys)
    first = keys - queries + 1  # keys that the first query sees, were there no limit on the left
    rising = max(0, min(queries, limit - first))
    return rising * (2 * first + rising - 1) / 2 + (queries - rising) * limit


def _scaled_dot_product(_: Numbers, given: dict[str, Any]) -> float:
    query = given["query"]
    key = given["key"]
    return 4.0 * query.numel() * key.shape[-2] / (2 if given.get("is_causal") else 1)


def _backward(forward: Work) -> Work:
    """Five products of matrices where the forward has two."""
    return lambda numbers, given: 2.5 * forward(numbers, given)


ATTENTION: dict[Any, Work] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _scaled_dot_product,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward(_scaled_dot_product),
    aten._flash_attention_forward: _segments,
    aten._flash_attention_backward: _backward(_segments),
}
