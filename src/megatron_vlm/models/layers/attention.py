"""Self-attention of the language model over a stream of documents: several backends that agree.

What a query sees is said in `attention_plan`. Tensors are (T, H, K) here: T tokens of this rank.
"""

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_vlm.models.layers.attention_kernels import KERNELS, Kernel
from megatron_vlm.models.layers.attention_plan import AttentionPlan, View
from megatron_vlm.models.layers.attention_sizes import heads_of
from megatron_vlm.models.layers.fused import HeadSettings, turned_heads


class CoreAttention(MegatronModule):
    """softmax(q k^T) v of one layer, through the backend that the config names."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None, **kwargs):
        super().__init__(config)
        self.backend = config.attention_backends[config.kv_channels]
        self.window = config.layer_windows[layer_number - 1] if config.layer_windows else None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.group = kwargs["pg_collection"].cp
        source = heads_of(config, layer_number - 1).source
        # the layer that makes its keys and values
        self.source = layer_number - 1 if source is None else source

    def forward(
        self, query_T1HK: Tensor, key_T1HK: Tensor, value_T1HK: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Returns (T, 1, H*K)."""
        query, key, value = (x.squeeze(1) for x in (query_T1HK, key_T1HK, value_T1HK))
        attend = plan.attend or CoreAttention.attend
        return attend(self, query, key, value, plan).flatten(1)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        view = plan.views[self.window]
        if view.exchange is not None:
            # this rank's keys and values, followed by other ranks', in one collective
            exchange = view.exchange
            both = torch.cat((key, value), dim=1)
            sent = both.index_select(0, exchange.rows)
            received = all_to_all(self.group, sent, exchange.received, exchange.sent)
            key, value = torch.cat((both, received)).chunk(2, dim=1)
        if self.backend == "dense":
            return dense(query, key, value, plan, view, self.scale)
        if view.order is not None:
            key, value = key.index_select(0, view.order), value.index_select(0, view.order)
        return Attend.apply(query, key, value, view, KERNELS[self.backend], self.scale)


class Attend(torch.autograd.Function):
    """A kernel over the segments of a view, joined with one over each of `View.more`.

    They see different keys. Their contexts are joined by their shares of the softmax, which follow from all
    log-sum-exps, and each gets its part of the gradient from the joined context and log-sum-exp.
    """

    @staticmethod
    def forward(ctx, query, key, value, view: View, kernel: Kernel, scale: float) -> Tensor:
        context, log_sum = kernel.forward(query, key, value, view.segments, scale)
        for queries, keys, segments in view.more:
            other, other_sum = kernel.forward(query[queries], key[keys], value[keys], segments, scale)
            sum_so_far = log_sum[:, queries]
            both_sum = torch.logaddexp(sum_so_far, other_sum)
            share_so_far, other_share = (
                (part - both_sum).exp().t()[..., None] for part in (sum_so_far, other_sum)
            )
            joined = context[queries] * share_so_far + other * other_share  # fp32, to round once
            context[queries] = joined.to(context.dtype)
            log_sum[:, queries] = both_sum
        ctx.save_for_backward(query, key, value, context, log_sum)
        ctx.view, ctx.kernel, ctx.scale = view, kernel, scale
        return context

    @staticmethod
    def backward(ctx, gradient: Tensor):
        query, key, value, context, log_sum = ctx.saved_tensors
        view, kernel, scale = ctx.view, ctx.kernel, ctx.scale
        grads = kernel.backward(gradient, (query, key, value), (context, log_sum), view.segments, scale)
        for queries, keys, segments in view.more:
            inputs = query[queries], key[keys], value[keys]
            outputs = context[queries], log_sum[:, queries].contiguous()
            gradients = kernel.backward(gradient[queries], inputs, outputs, segments, scale)
            for grad, rows, more in zip(grads, (queries, keys, keys), gradients, strict=True):
                grad.index_add_(0, rows, more)
        return *grads, None, None, None


def dense(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, view: View, scale: float) -> Tensor:
    """PyTorch's attention with an explicit mask over all pairs: it runs everywhere and is the reference."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    kind = (view.window, query.dtype)
    if kind not in plan.masks:
        plan.masks[kind] = mask(plan, view).to(plan.device, query.dtype).log()
    context = scaled_dot_product_attention(
        query, key, value, attn_mask=plan.masks[kind], scale=scale, enable_gqa=True
    )
    return context[0].transpose(0, 1)


def mask(plan: AttentionPlan, view: View) -> Tensor:
    """(T, keys) bool: whether a query (row) may see a key (column), the rule of `attention_plan` as it reads.

    Padding sees itself, so that no row of the softmax is empty.
    """
    placement = plan.placement
    keys = np.concatenate((plan.places, np.full(plan.length - len(plan.places), -1), view.received))
    lengths = placement.ends - placement.starts
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    block_of = np.zeros(len(document_of), np.int64)  # from 1; 0: in no block
    for number, (document, start, stop) in enumerate(placement.blocks, 1):
        first = placement.starts[document]
        block_of[first + start : first + stop] = number
    documents = document_of[keys]
    blocks = block_of[keys]
    distance = keys[: plan.length, None] - keys[None]
    same_document = documents[: plan.length, None] == documents[None]
    in_block = (blocks[: plan.length, None] == blocks[None]) & (blocks[None] > 0)
    in_block = in_block & placement.has_blocks(view.window)
    seen = same_document & ((distance >= 0) | in_block)
    if view.window is not None:
        seen &= (distance < view.window) | (in_block & (placement.bidirectional == "whole"))
    is_padding = keys < 0
    seen &= ~is_padding[: plan.length, None] & ~is_padding[None]
    seen[np.arange(plan.length), np.arange(plan.length)] = True
    return torch.from_numpy(seen)


class RotarySelfAttention(SelfAttention):
    """Self-attention with Megatron's parameters and projections, and our plan with its rotary tables.

    Megatron passes the plan from block to layer unchanged, also through activation recomputation.
    """

    def __init__(self, config: TransformerConfig, submodules, layer_number: int, **kwargs):
        super().__init__(config, submodules, layer_number, **kwargs)
        self.rotary_index = config.layer_rotary[layer_number - 1] if config.layer_rotary else 0
        self.head_settings = HeadSettings(
            config.layernorm_epsilon,
            config.layernorm_zero_centered_gamma,
            config.wide_norms,
            config.rotary_interleaved,
            bool(config.attention_output_gate),
        )

    def make_heads(self, hidden_states: Tensor, plan: AttentionPlan) -> tuple[Tensor, ...]:
        """(S, B, H, K) each, H of this rank: queries and keys, turned by their positions, and values; with
        `attention_output_gate` the queries' gates (S, B, H*K) follow."""
        rows, _ = self.linear_qkv(hidden_states)
        sizes = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        weights = (None, None)
        if self.config.qk_layernorm:
            weights = self.q_layernorm.weight, self.k_layernorm.weight
        turns = plan.turns[self.rotary_index]
        return turned_heads(rows.unflatten(-1, sizes), weights, turns, self.head_settings)

    def forward(self, hidden_states: Tensor, *_, packed_seq_params: AttentionPlan, **__):
        query, key, value, *gates = self.make_heads(hidden_states, packed_seq_params)
        context = self.core_attention(query, key, value, packed_seq_params)
        for gate in gates:
            context = context * gate.sigmoid()
        return self.linear_proj(context)
