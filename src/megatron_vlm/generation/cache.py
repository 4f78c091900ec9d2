"""Keys and values of the tokens so far, held outside the model and handed to its layers by the plan.

`CoreAttention` calls `plan.attend` in place of its own attention, with itself as the first argument.
`Prefill` keeps what passes and lets the layer attend as in training. A `DecodePlan` has one query for each
row, which sees the row's cache. There are R rows with equally many slots in a layer; H are key/value heads,
K their channels.

A layer's cache has 2 * H / tp * K numbers for each token of a row. Rows with shorter prompts start later, so
that the tokens of one step have the same place. There is a slot for every place; with a sliding window, as
many as the window, and place p is slot p % window.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, silu

from megatron_vlm.models.language_model import LanguageModelConfig
from megatron_vlm.models.layers.attention import CoreAttention
from megatron_vlm.models.layers.attention_plan import AttentionPlan
from megatron_vlm.models.layers.attention_sizes import RECURRENT, heads_of
from megatron_vlm.models.layers.cross_layer import CrossLayerTensors
from megatron_vlm.models.layers.delta_net import GatedDeltaNet
from megatron_vlm.models.layers.delta_rule import convolved, run, step
from megatron_vlm.parallel.setup import on_device


def bytes_per_row(config: LanguageModelConfig, tokens: int) -> int:
    """The bytes of all layers' caches for a row of so many tokens, on a rank of tensor parallelism."""
    numbers = states = 0
    for layer, window in enumerate(config.layer_windows or [None] * config.num_layers):
        heads = heads_of(config, layer)
        if heads.source is None:
            numbers += slots_of(window, tokens) * 2 * heads.groups * heads.channels
        if window == RECURRENT:
            numbers += (config.delta_heads.taps - 1) * config.delta_heads.convolved
            states += config.delta_heads.state
    ranks = config.tensor_model_parallel_size
    return (numbers * config.params_dtype.itemsize + states * torch.float32.itemsize) // ranks


def slots_of(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


class KeyValueCache:
    """The keys and values (B, H, slots, K) of each layer for `tokens` places. Row i begins at `starts[i]`.
    Layers that take the keys and values of another have its cache.

    Of a gated delta net, what its convolution still sees (B, taps - 1, C) and its states (B, G, R, K, V).
    """

    def __init__(self, starts: np.ndarray, tokens: int):
        self.starts, self.tokens = starts, tokens
        self._held: dict[int | GatedDeltaNet, tuple[Tensor, Tensor]] = {}

    def of(self, layer: CoreAttention, key: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's, at first for keys like this (T, H, K)."""
        if layer.source not in self._held:
            shape = len(self.starts), key.shape[1], slots_of(layer.window, self.tokens), key.shape[2]
            # slots not yet written are masked, but must be finite
            self._held[layer.source] = key.new_zeros(shape), key.new_zeros(shape)
        return self._held[layer.source]

    def of_net(self, net: GatedDeltaNet, last: Tensor) -> tuple[Tensor, Tensor]:
        """The net's, at first for tokens to convolve like these (T, C)."""
        if net not in self._held:
            heads, rows, ranks = net.heads, len(self.starts), net.tp_group.size()
            state = rows, heads.keys // ranks, net.ratio, heads.key_channels, heads.value_channels
            wide = torch.promote_types(last.dtype, torch.float32)
            tail = last.new_zeros(rows, heads.taps - 1, last.shape[1])
            self._held[net] = tail, last.new_zeros(state, dtype=wide)
        return self._held[net]

    def select(self, rows: np.ndarray) -> None:
        """Row i becomes a copy of what was row `rows[i]`."""
        self.starts = self.starts[rows]
        for layer, both in self._held.items():
            kept_rows = on_device(rows, both[0].device)
            self._held[layer] = tuple(tensor[kept_rows] for tensor in both)


class Prefill:
    """`attend` of a plan of whole prompts, which become rows `first`, `first + 1`, … of the cache."""

    def __init__(
        self, cache: KeyValueCache, first: int, lengths: np.ndarray, windows: Iterable[int | None], device
    ):
        self._cache, self._first, self._lengths, self._ends = cache, first, lengths, np.cumsum(lengths)
        self._places = {}  # by window: tokens of the stream, their rows and their slots
        ends = np.cumsum(lengths)
        for window in set(windows) - {RECURRENT}:
            slots = slots_of(window, cache.tokens)
            kept = np.minimum(lengths, slots)
            rows = np.repeat(np.arange(len(lengths)), kept)
            tokens = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, kept, strict=True)])
            # of the stream -> of the row, counted from where the longest row starts
            places = tokens - (ends - lengths)[rows] + cache.starts[first + rows]
            self._places[window] = [
                on_device(array, device) for array in (tokens, first + rows, places % slots)
            ]

    def __call__(self, layer: CoreAttention, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan):
        tokens, rows, slots = self._places[layer.window]
        for cached, new in zip(self._cache.of(layer, key), (key, value), strict=True):
            cached[rows, :, slots] = new.index_select(0, tokens)
        return layer.attend(query, key, value, plan)

    def recur(self, net: GatedDeltaNet, mixed_TGX: Tensor, plan: AttentionPlan) -> Tensor:
        """In place of `GatedDeltaNet.recur`."""
        documents, last = plan.views[RECURRENT].whole, net.to_convolve(mixed_TGX)
        tails, states = self._cache.of_net(net, last)
        convolved_TC = convolved(last, net.conv1d.squeeze(1), documents.place)
        inputs = *net.rule_inputs(convolved_TC, mixed_TGX), documents.number
        outputs, _, ends = run(inputs, (self._ends - 1).tolist())
        for row, (end, length, state) in enumerate(
            zip(self._ends, self._lengths, ends, strict=True), self._first
        ):
            states[row] = state
            kept = min(length, tails.shape[1])
            tails[row, tails.shape[1] - kept :] = last[end - kept : end]
        return outputs


class DecodePlan:
    """The plan of a stream of one token for each row, at `place`, then padding."""

    turns: list[list[list[Tensor]]]  # see `AttentionPlan`
    query_scale: Tensor | None
    asides: dict[int, CrossLayerTensors]

    def __init__(
        self,
        cache: KeyValueCache,
        place: int,
        windows: Iterable[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._cache, self._dtype, self._device = cache, dtype, device
        self._views = {
            window: self._view(place, slots_of(window, cache.tokens)) for window in set(windows) - {RECURRENT}
        }

    def _view(self, place: int, slots: int) -> tuple[int, int, Tensor | None]:
        """The slot of the new token, how many are seen, and (B, 1, 1, seen) that hides what is no token."""
        seen, starts = min(place + 1, slots), self._cache.starts
        if place + 1 - seen >= starts.max():
            return place % slots, seen, None
        hidden = torch.from_numpy(place - (place - np.arange(seen)) % slots < starts[:, None])
        hidden = on_device(hidden[:, None, None], self._device)
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return place % slots, seen, zeros.masked_fill_(hidden, -torch.inf)

    def attend(self, layer: CoreAttention, query: Tensor, key: Tensor, value: Tensor, _) -> Tensor:
        """(T, H, K). The query heads of one key/value head are as queries of one head."""
        slot, seen, mask = self._views[layer.window]
        rows, tokens = len(self._cache.starts), len(query)
        if rows < tokens:
            query, key, value = query[:rows], key[:rows], value[:rows]
        keys, values = self._cache.of(layer, key)
        keys.select(2, slot).copy_(key)
        values.select(2, slot).copy_(value)
        context = scaled_dot_product_attention(
            query.unflatten(1, (key.shape[1], -1)),
            keys.narrow(2, 0, seen),
            values.narrow(2, 0, seen),
            attn_mask=mask,
            scale=layer.scale,
        ).flatten(1, 2)
        return pad(context, (0, 0, 0, 0, 0, tokens - rows)) if rows < tokens else context

    def recur(self, net: GatedDeltaNet, mixed_TGX: Tensor, _) -> Tensor:
        """(T, G, R, V), in place of `GatedDeltaNet.recur`."""
        rows, tokens = len(self._cache.starts), len(mixed_TGX)
        mixed_BGX = mixed_TGX[:rows]
        last = net.to_convolve(mixed_BGX)
        tails, state = self._cache.of_net(net, last)
        seen = torch.cat((tails, last[:, None]), dim=1)
        tails.copy_(seen[:, 1:])
        weight = net.conv1d.squeeze(1).to(state.dtype)
        convolved_BC = silu((seen.to(state.dtype) * weight.t()).sum(1)).to(last.dtype)
        outputs = step(state, *net.rule_inputs(convolved_BC, mixed_BGX))
        return pad(outputs, (0, 0, 0, 0, 0, 0, 0, tokens - rows)) if rows < tokens else outputs
