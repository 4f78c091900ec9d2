"""Keys and values of the tokens so far, held outside the model and handed to its layers by the plan.

`CoreAttention` calls `plan.attend` in place of its own attention, with itself as the first argument.
`Prefill` keeps what passes and lets the layer attend as in training. A `DecodePlan` has one query for each
row, which sees the row's cache. There are R rows with equally many slots in a layer; H are key/value heads,
K their channels.

A layer's cache has 2 * H / tp * K numbers for each token of a row. It has a slot for every token that a row
can get; with a sliding window, as many as the window, and token p lies in slot p % window.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_vlm.models.attention_sizes import heads_of
from megatron_vlm.models.language_model import LanguageModelConfig
from megatron_vlm.models.layers.attention import CoreAttention
from megatron_vlm.models.layers.attention_plan import AttentionPlan


def bytes_per_row(config: LanguageModelConfig, tokens: int) -> int:
    """Of the caches of all layers, for a row of so many tokens, on a rank of tensor parallelism."""
    numbers = 0
    for layer, window in enumerate(config.layer_windows or [None] * config.num_layers):
        heads = heads_of(config, layer)
        groups = heads.groups // config.tensor_model_parallel_size
        numbers += slots_of(window, tokens) * 2 * groups * heads.channels
    return numbers * config.params_dtype.itemsize


def slots_of(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


class KeyValueCache:
    """By layer, keys and values (R * slots, H, K), for rows of at most `tokens` tokens."""

    def __init__(self, rows: int, tokens: int):
        self.rows, self.tokens = rows, tokens
        self._held: dict[CoreAttention, tuple[Tensor, Tensor]] = {}

    def write(self, layer: CoreAttention, key: Tensor, value: Tensor, where: Tensor) -> None:
        """Keys and values (n, H, K) into the layer's numbers `where` (n,) of R * slots."""
        if layer not in self._held:
            shape = (self.rows * slots_of(layer.window, self.tokens), *key.shape[1:])
            # slots not yet written are masked, but must be finite
            self._held[layer] = key.new_zeros(shape), value.new_zeros(shape)
        for held, new in zip(self._held[layer], (key, value), strict=True):
            held.index_copy_(0, where, new)

    def read(self, layer: CoreAttention, slots: int) -> Iterable[Tensor]:
        """Keys and values (R, H, slots, K) of the first slots."""
        for held in self._held[layer]:
            yield held.view(self.rows, -1, *held.shape[1:])[:, :slots].transpose(1, 2)

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of what was row `rows[i]`."""
        for layer, both in self._held.items():
            self._held[layer] = tuple(
                held.unflatten(0, (self.rows, -1)).index_select(0, rows).flatten(0, 1) for held in both
            )
        self.rows = len(rows)


class Prefill:
    """`attend` of a plan of whole prompts, which become rows `first`, `first + 1`, … of the cache."""

    def __init__(
        self, cache: KeyValueCache, first: int, lengths: list[int], windows: Iterable[int | None], device
    ):
        self._cache = cache
        self._places = {}  # by window: tokens of the stream, and where they go in the cache
        starts = np.cumsum([0, *lengths])
        for window in set(windows):
            slots = slots_of(window, cache.tokens)
            tokens, where = [], []
            for row, (start, length) in enumerate(zip(starts, lengths, strict=False), first):
                places = np.arange(max(0, length - slots), length)
                tokens.append(start + places)
                where.append(row * slots + places % slots)
            self._places[window] = [
                torch.from_numpy(np.concatenate(x)).to(device, non_blocking=True) for x in (tokens, where)
            ]

    def __call__(self, layer: CoreAttention, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan):
        tokens, where = self._places[layer.window]
        self._cache.write(layer, key.index_select(0, tokens), value.index_select(0, tokens), where)
        return layer.attend(query, key, value, plan)


class DecodePlan:
    """The plan of a stream of one token for each row, the row's token number `places[row]`; then padding."""

    def __init__(self, cache: KeyValueCache, places: np.ndarray, windows: Iterable[int | None], device):
        self._cache = cache
        self._views = {}  # by window: where the new keys go, how many slots are seen, those that are not
        for window in set(windows):
            slots = slots_of(window, cache.tokens)
            where = torch.from_numpy(np.arange(len(places)) * slots + places % slots)
            seen = min(int(places.max()) + 1, slots)
            hidden = np.arange(seen) > places[:, None]
            mask = torch.from_numpy(hidden)[:, None, None].to(device) if hidden.any() else None
            self._views[window] = where.to(device, non_blocking=True), seen, mask
        self._masks: dict[tuple[int | None, torch.dtype], Tensor | None] = {}  # made once for all layers

    def attend(self, layer: CoreAttention, query: Tensor, key: Tensor, value: Tensor, _) -> Tensor:
        """(T, H, K). The query heads of one key/value head are as queries of one head."""
        cache, (where, slots, _) = self._cache, self._views[layer.window]
        cache.write(layer, key[: cache.rows], value[: cache.rows], where)
        keys, values = cache.read(layer, slots)
        queries = query[: cache.rows].unflatten(1, (keys.shape[1], -1))
        context = scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask(layer.window, query.dtype), scale=layer.scale
        )
        padding = len(query) - cache.rows
        context = context.flatten(1, 2)
        return pad(context, (0, 0, 0, 0, 0, padding)) if padding else context

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if (window, dtype) not in self._masks:
            hidden = self._views[window][2]
            zero = None if hidden is None else torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window, dtype] = zero if zero is None else zero.masked_fill_(hidden, -torch.inf)
        return self._masks[window, dtype]
