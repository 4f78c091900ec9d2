"""Self-attention of the language model: one definition of the mask, several backends that must agree.

A query may see a key exactly if both lie in the same document and
  - the key is not later, or both lie in the same bidirectional block (an image's tokens, for Gemma3), and
  - in a layer with a sliding window, the key is less than `window` positions back.
The mask is described by `segments` (2, B, S) int32 = [document number, bidirectional block number], where 0
means padding and no block. Padding attends to padding, so that no row of the softmax is empty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

_MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # segments -> masks, freed with segments


def mask(segments: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, S, S) to add to the scores: 0 where a query (row) may see a key (column), else minus infinity.

    Built once per batch and window in the scores' dtype: layers share it, also in their backward.
    """
    masks = _MASKS.setdefault(segments, {})
    if window not in masks:
        documents_BS, blocks_BS = segments
        position_S = torch.arange(segments.shape[-1], device=segments.device)
        distance_SS = position_S[:, None] - position_S[None, :]
        in_block = (blocks_BS[:, :, None] == blocks_BS[:, None, :]) & (blocks_BS[:, :, None] > 0)
        allowed = (documents_BS[:, :, None] == documents_BS[:, None, :]) & ((distance_SS >= 0) | in_block)
        if window:
            allowed &= distance_SS < window
        masks[window] = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)[:, None]
    return masks[window]


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, window: int | None, scale: float
) -> Tensor:
    """PyTorch's scaled dot-product attention with an explicit mask: it runs everywhere and is the reference.

    query (B, H, S, K), key and value (B, H_kv, S, K) -> (B, H, S, K).
    """
    added = mask(segments, window, query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale, enable_gqa=True)


BACKENDS: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa}


class CoreAttention(MegatronModule):
    """softmax(q k^T) v of one layer, through the backend that the config names."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None, **_):
        super().__init__(config)
        self.backend = BACKENDS[config.attention_backend_name]
        self.window = config.layer_windows[layer_number - 1] if config.layer_windows else None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(self, query_SBHK: Tensor, key_SBHK: Tensor, value_SBHK: Tensor, segments: Tensor) -> Tensor:
        """Returns (S, B, H*K)."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBHK, key_SBHK, value_SBHK))
        context_BHSK = self.backend(query, key, value, segments, self.window, self.scale)
        return context_BHSK.permute(2, 0, 1, 3).flatten(2)


class RotarySelfAttention(SelfAttention):
    """Self-attention with Megatron's parameters and projections, and our rotary tables and masks.

    `rotary_pos_emb` is `models.layers.rotary.Rotary`'s table, `attention_mask` the segments described above.
    Megatron passes both from block to layer unchanged, also through activation recomputation.
    """

    def __init__(self, config: TransformerConfig, submodules, layer_number: int, **kwargs):
        super().__init__(config, submodules, layer_number, **kwargs)
        self.rotary_index = config.layer_rotary[layer_number - 1] if config.layer_rotary else 0

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor, **_):
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        tables = rotary_pos_emb[self.rotary_index].to(query.dtype)
        query, key = rotate(query, *tables[0]), rotate(key, *tables[-1])
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(
                self.core_attention, False, query, key, value, attention_mask
            )
        else:
            context = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(context)


def rotate(x_SBHK: Tensor, cos_SB1R: Tensor, sin_SB1R: Tensor) -> Tensor:
    """Rotary embedding of the first R of K channels, halves paired as in GPT-NeoX; the rest is unchanged."""
    rotary_width = cos_SB1R.shape[-1]
    x, rest = x_SBHK[..., :rotary_width], x_SBHK[..., rotary_width:]
    first, second = x.chunk(2, dim=-1)
    x = x * cos_SB1R + torch.cat((-second, first), dim=-1) * sin_SB1R
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x
