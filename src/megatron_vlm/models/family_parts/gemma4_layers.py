"""Gemma 4's transformer layers, from ours: what its text model has that no other family's has."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_vlm.models.language_model import (
    INPUTS,
    DeepstackLayer,
    LanguageModelConfig,
    OwnInput,
    has_experts,
)
from megatron_vlm.models.language_model import layer_spec as our_layer_spec
from megatron_vlm.models.layers.attention import RotarySelfAttention
from megatron_vlm.models.layers.attention_plan import AttentionPlan
from megatron_vlm.models.layers.attention_sizes import Heads, feed_forward_width, heads_of
from megatron_vlm.models.layers.cross_layer import publish, read
from megatron_vlm.models.layers.fused import NormThenAdd, RMSNorm, norm, rotate
from megatron_vlm.models.layers.moe import MoE, Router
from megatron_vlm.parallel.linears import ColumnParallelLinear


def layer_spec(config: LanguageModelConfig, layer: int) -> ModuleSpec:
    """Transformer layer number `layer`, for `LanguageModelConfig.own_layer_spec`."""
    spec = our_layer_spec(config, layer)
    parts, attention = spec.submodules, spec.submodules.self_attention
    heads = heads_of(config, layer)
    attention.module = OwnHeadsAttention
    attention.submodules.linear_qkv = partial(OwnRowsLinear, heads=heads)
    if heads.source is not None:
        attention.submodules.k_layernorm = IdentityOp
    if config.layer_inputs:
        spec.module = LayerWithInput
    else:
        parts.mlp_bda = ModuleSpec(NormThenAddThenScale, params={"config": config})
    if config.layer_ffn:
        parts.mlp = partial(_of_width, parts.mlp, feed_forward_width(config, layer))
    if has_experts(config, layer):
        parts.pre_mlp_layernorm, parts.mlp = IdentityOp, DenseAndExperts
    return spec


def _of_width(mlp: Callable[..., nn.Module], width: int, *, config: LanguageModelConfig, **arguments: Any):
    config = copy.copy(config)
    config.ffn_hidden_size = width
    return mlp(config=config, **arguments)


class LayerWithInput(DeepstackLayer):
    """A transformer layer with an input of its own."""

    def __init__(self, config: LanguageModelConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.own_input = OwnInput(config)

    def forward(self, hidden_states: Tensor, *, packed_seq_params: AttentionPlan, **arguments: Any):
        hidden, context = super().forward(hidden_states, packed_seq_params=packed_seq_params, **arguments)
        hidden, layer_input = read(hidden, packed_seq_params.asides[INPUTS], self.layer_number - 1)
        return self.own_input(hidden, layer_input), context


class PlainNorm(nn.Module):
    """A root-mean-square norm without weights, in fp32."""

    def __init__(self, config: LanguageModelConfig, width: int):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.register_buffer("ones", torch.ones(width, dtype=config.params_dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.ones, self.eps, False, True)


class OwnRowsLinear(ColumnParallelLinear):
    """Megatron's `linear_qkv` without rows for what a layer does not make: values, or keys and values."""

    def __init__(self, width: int, out: int, *, heads: Heads, **kwargs: Any):
        super().__init__(width, out - (2 * heads.groups - heads.made) * heads.channels, **kwargs)


class OwnHeadsAttention(RotarySelfAttention):
    """Attention with its layer's own heads; values are normed, and may be the keys before their norm. A
    layer may take the keys, turned by their positions, and the values that an earlier layer put aside.
    """

    def __init__(self, config: LanguageModelConfig, submodules: Any, layer_number: int, **kwargs: Any):
        heads, config = heads_of(config, layer_number - 1), copy.copy(config)
        config.kv_channels, config.num_query_groups = heads.channels, heads.groups
        super().__init__(config, submodules, layer_number, **kwargs)
        self.heads = heads
        self.v_layernorm = PlainNorm(config, heads.channels)
        self.lends = any(layer.source == layer_number - 1 for layer in config.layer_heads)

    def make_heads(self, hidden_states: Tensor, plan: AttentionPlan) -> tuple[Tensor, ...]:
        both, _ = self.linear_qkv(hidden_states)
        turns, adjacent = plan.turns[self.rotary_index], self.config.rotary_interleaved
        if self.heads.source is not None:
            query = self.q_layernorm(both.unflatten(-1, (-1, self.heads.channels)))
            return read(rotate(query, *turns[0], adjacent), plan.asides[self.heads.source], 0, 1)
        both = both.unflatten(-1, (self.num_query_groups_per_partition, -1, self.heads.channels))
        key_value_heads = 1 + self.heads.values
        query, key, *values = both.split([both.shape[-2] - key_value_heads] + key_value_heads * [1], dim=-2)
        key, value = key.squeeze(-2), (values or [key])[0].squeeze(-2)
        query = rotate(self.q_layernorm(query.flatten(2, 3)), *turns[0], adjacent)
        key, value = rotate(self.k_layernorm(key), *turns[-1], adjacent), self.v_layernorm(value)
        if self.lends:
            query = publish(query, plan.asides[self.layer_number - 1], key, value)
        return query, key, value


class NormThenAddThenScale(NormThenAdd):
    """(residual + norm(sub-layer output)) times a number of the checkpoint's, which is not trained."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__(config)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def _add(self, *args: Any) -> Tensor:
        return super()._add(*args) * self.layer_scalar


class ScaledRouter(Router):
    """A router that norms its input and scales it by channel, and its choices' weights by expert."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        width, experts = self.config.hidden_size, self.config.num_moe_experts
        self.norm = PlainNorm(self.config, width)
        self.scale = nn.Parameter(torch.ones(width, dtype=self.config.params_dtype))
        self.per_expert_scale = nn.Parameter(torch.ones(experts, dtype=self.config.params_dtype))
        for weight in (self.scale, self.per_expert_scale):
            weight.sequence_parallel = self.config.sequence_parallel

    def forward(self, hidden_SBD: Tensor, routes_SBLJ: Tensor) -> tuple[Tensor, Tensor]:
        scaled = self.norm(hidden_SBD) * self.scale * self.config.hidden_size**-0.5
        weights_TJ, experts_TJ = super().forward(scaled, routes_SBLJ)
        scale_TX = self.per_expert_scale.expand(len(experts_TJ), -1)  # its gradient is a sum in their order
        return weights_TJ * scale_TX.gather(1, experts_TJ), experts_TJ

    def gating(self, hidden_SBD: Tensor) -> Tensor:
        """Logits in fp32: Megatron then gives weights in fp32, as Transformers does here."""
        return super().gating(hidden_SBD).float()


class DenseAndExperts(MoE):
    """A dense feed-forward and routed experts, each between norms of its own; their outputs are added.

    The dense one is Megatron's shared experts. All three, the router too, take the layer's hidden states, to
    which no norm was applied.
    """

    router_class = ScaledRouter

    def __init__(self, config: LanguageModelConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        for name in ("norm_of_dense", "norm_after_dense", "norm_of_experts", "norm_after_experts"):
            self.add_module(name, RMSNorm(config, config.hidden_size, config.layernorm_epsilon))

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor) -> tuple[Tensor, None]:
        weights_TJ, experts_TJ = self.router(hidden_SBD, padding_mask.transpose(0, 1))
        normed_TD = self.norm_of_experts(hidden_SBD).flatten(0, 1)
        routed_SBD = self._routed(normed_TD, weights_TJ, experts_TJ).view_as(hidden_SBD)
        dense_SBD = self.shared_experts(self.norm_of_dense(hidden_SBD))
        return self.norm_after_dense(dense_SBD) + self.norm_after_experts(routed_SBD), None
