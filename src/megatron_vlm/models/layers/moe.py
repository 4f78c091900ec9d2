"""Mixture of experts: Megatron's router and shared experts, and experts computed together.

Tensor parallelism never cuts experts: in our families they are a few hundred channels wide. Expert
parallelism spreads them over tensor- and data-parallel ranks alike; each rank holds whole experts.

Tokens go to their experts and back as rows in another order, here and on other ranks. The indices of that
order are made on the device and stay there. Each gradient is a sum in a fixed order, so it is the same at
every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter
from torch.nn.functional import linear

from megatron_vlm.models.layers.fused import GatedFeedForward, gated
from megatron_vlm.parallel.linears import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    grouped_product,
)

FREE_ROUTE, ROUTE_OF_PADDING = -1, -2  # in place of an expert's number: the router chooses


class RouteReplay:
    """Which experts a token takes (T, k), in the order of their numbers: `routes_TJ`, or the choice of the
    router for a token whose routes are negative.

    Megatron calls it in place of its own top-k, which orders experts by their scores with gradients, and not
    at all without. Another order would change the last bits of the sum that divides the weights.
    """

    def __init__(self, routes_TJ: Tensor):
        self.routes_TJ = routes_TJ

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups, group_topk, default_compute_topk):
        chosen = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        chosen = torch.where(self.routes_TJ < 0, chosen, self.routes_TJ)
        self.experts_TJ = chosen.sort(dim=1).values
        return scores.gather(1, self.experts_TJ), self.experts_TJ


class Router(TopKRouter):
    """Top-k routing with a selection bias from the checkpoint, which is read and saved but never updated.

    Given experts take the place of the chosen ones; their weights are the router's own and have its gradient.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True
        self.trained_weight = 0.0  # of the current micro batch, on all ranks of context parallelism
        self.expert_tokens: Tensor | None = None  # (experts,) int64, if the tokens of each are to be counted

    def forward(self, hidden_SBD: Tensor, routes_SBLJ: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token (T, J), see `RouteReplay`, after their weights.

        The routes are `Stream.routes`. They come to a layer as its tokens do, also when it is recomputed, and
        no module keeps them.
        """
        layer = self.layer_number - 1 if routes_SBLJ.shape[2] > 1 else 0
        routes_SBJ = routes_SBLJ[:, :, layer].long()
        self.router_replay = choice = RouteReplay(routes_SBJ.flatten(0, 1))
        try:
            padding_SB = routes_SBJ[..., 0] == ROUTE_OF_PADDING if torch.is_grad_enabled() else None
            weights_TJ = super().forward(hidden_SBD, padding_SB)[0]
        finally:
            self.router_replay = None
        if torch.is_grad_enabled():
            weights_TJ = weights_TJ.gather(1, choice.experts_TJ)
        if self.topk == 1:  # Transformers divides by the sum of one weight, too, and Megatron does not
            scale = self.config.moe_router_topk_scaling_factor or 1.0
            weights_TJ = weights_TJ / (weights_TJ.sum(-1, keepdim=True) + 1e-20) * scale
        return weights_TJ, choice.experts_TJ

    def gating(self, input: Tensor) -> Tensor:
        """Megatron's method, whose product is an autograd function; without gradients it is the plain one."""
        if torch.is_grad_enabled():
            return super().gating(input)
        dtype = torch.float32 if self.config.moe_router_dtype else input.dtype
        return linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's method, which returns the weights of all experts (T, X); without gradients nothing is
        counted, and the weights are the chosen experts' (T, J)."""
        if torch.is_grad_enabled():
            return super().routing(logits, padding_mask)
        return topk_routing_with_score_function(
            logits.flatten(0, 1),
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=self.router_replay,
            dense_output=True,
        )

    def attach_and_log_load_balancing_loss(self, *args, **kwargs) -> Tensor:
        """Megatron's method, with the balance of a micro batch weighted by its trained tokens, like its loss.

        Megatron weights it by all tokens, while gradients are divided by the trained ones: the coefficient
        would grow with every prompt token.
        """
        kwargs["valid_token_count"] = self.trained_weight / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts each expert's tokens in training, once if a layer is recomputed. Megatron would do it to
        update the bias (and 0.19 fails on a padding mask)."""
        if self.expert_tokens is None or not torch.is_grad_enabled():
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        self.expert_tokens += routing_map.sum(dim=0)


class Experts(MegatronModule):
    """This rank's experts, each a gated MLP, computed by one grouped matrix product per projection.

    `linear_fc1` (X, 2 * I, D) holds gate, then up; `linear_fc2` (X, D, I). Only in bf16 on CUDA is the
    grouped product one kernel; in fp32 there, torch loops and waits for the device.

    Megatron reduces the gradients of experts over a group of their own, and gives them their own optimizer,
    only if that group differs from the data-parallel one. Here it always does both. This changes no number
    and lets a checkpoint go from any expert parallelism to any other.
    """

    def __init__(self, config: TransformerConfig, experts: int, groups: ProcessGroupCollection):
        super().__init__(config)
        self.experts, self.groups = experts, groups
        # by projection, what changes its output: (rows, output, ends of each expert's rows) -> output
        self.adapted: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        width, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = self._weights(2 * ffn, width, config.init_method)
        self.linear_fc2 = self._weights(width, ffn, config.output_layer_init_method)

    def _weights(self, rows: int, columns: int, init: Callable[[Tensor], Any]) -> Parameter:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        weights = Parameter(
            torch.empty(self.experts, rows, columns, dtype=self.config.params_dtype, device=device)
        )
        weights.allreduce = False
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init(weights)
        return weights

    def forward(
        self, rows_ZD: Tensor, by_expert: TokenOrder, weights_Z: Tensor, counts_X: list[int] | None = None
    ) -> Tensor:
        """The experts' outputs (Z, D), times `weights_Z`. Rows are sorted by their expert's number here.
        `counts_X` are rows of each, if the host knows them."""
        ends_X = by_expert.ends(self.experts)
        counts_X = counts_X if self.config.gradient_accumulation_fusion else None
        gate_up = self._projected("linear_fc1", rows_ZD, ends_X, counts_X)
        inner = gated(gate_up, self.config.activation_func, weights_Z)
        return self._projected("linear_fc2", inner, ends_X, counts_X)

    def _projected(self, name: str, rows: Tensor, ends_X: Tensor, counts_X: list[int] | None) -> Tensor:
        output = grouped_product(rows, getattr(self, name), ends_X, counts_X)
        return self.adapted[name](rows, output, ends_X) if name in self.adapted else output

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, ShardedTensor]:
        """The keys and global shapes of Megatron's SequentialMLP, which wrote the first checkpoints."""
        ep, replica = self.groups.ep, (0, 0, self.groups.expt_dp.rank())
        axis = len(sharded_offsets)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}.weight",
                weights,
                *sharded_offsets,
                (axis, ep.rank(), ep.size()),
                replica_id=replica,
                prepend_axis_num=axis,
            )
            for name, weights in self.named_parameters()
        }


class SharedExperts(SharedExpertMLP, GatedFeedForward):
    """Megatron's, which computes its feed-forward by the next class; its gate is a linear, for adapters."""

    def __init__(self, config: TransformerConfig, linears: MLPSubmodules, groups: ProcessGroupCollection):
        super().__init__(config, linears, False, groups)
        self.gate = WholeLinear(config.hidden_size, 1, config) if config.moe_shared_expert_gate else None

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        output_SBD = super().forward(hidden_SBD)
        return output_SBD if self.gate is None else output_SBD * self.gate(hidden_SBD).sigmoid()


class MoE(BaseMoELayer):
    """A layer's feed-forward: routed experts and, if the config has them, shared ones, which all tokens pass.

    The host waits for the device only to learn how many rows go to and come from other ranks: never without
    expert parallelism, and once with it.
    """

    router_class = Router

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool, **_
    ):
        super().__init__(config, None, pg_collection, is_mtp_layer)
        self.router = self.router_class(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.experts = Experts(config, self.num_local_experts, pg_collection)
        if self.use_shared_expert:
            linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
            self.shared_experts = SharedExperts(config, linears, pg_collection)

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor) -> tuple[Tensor, None]:
        """(S, B, D) → the same; the second is Megatron's bias, which there is not. What Megatron calls a
        padding mask are `Stream.routes`, which say more of each token."""
        weights_TJ, experts_TJ = self.router(hidden_SBD, padding_mask.transpose(0, 1))
        output_SBD = self._routed(hidden_SBD.flatten(0, 1), weights_TJ, experts_TJ).view_as(hidden_SBD)
        if self.use_shared_expert:
            output_SBD = output_SBD + self.shared_experts(hidden_SBD)
        return output_SBD, None

    def _routed(self, hidden_TD: Tensor, weights_TJ: Tensor, experts_TJ: Tensor) -> Tensor:
        experts = experts_TJ.flatten()
        by_expert = TokenOrder.by(experts, self.config.moe_router_topk)
        rows = reordered(hidden_TD, by_expert, False)
        weights = weights_TJ.flatten().index_select(0, by_expert.places)
        if self.ep_group.size() == 1:
            return reordered(self.experts(rows, by_expert, weights), by_expert, True)
        counts_X = experts.new_zeros(self.config.num_moe_experts)
        counts_X.scatter_add_(0, experts, torch.ones_like(experts))
        exchange = ExpertExchange(counts_X, self.ep_group)
        rows, weights = exchange.there(rows), exchange.there(weights)
        by_local = TokenOrder.by(exchange.experts)
        rows, weights = reordered(rows, by_local, False), weights[by_local.places]
        output = self.experts(rows, by_local, weights, exchange.counts)
        output = reordered(output, by_local, True)
        return reordered(exchange.back(output), by_expert, True)


@dataclass(frozen=True)
class TokenOrder:
    """Rows sorted by a key: the sorted row i was number `places[i]`, and its key is `keys[i]`.

    Unsorted, the `copies` of each original row follow one another.
    """

    keys: Tensor
    places: Tensor
    copies: int

    @classmethod
    def by(cls, keys: Tensor, copies: int = 1) -> TokenOrder:
        """Rows of equal keys stay in their order."""
        return cls(*keys.sort(stable=True), copies)

    def ends(self, numbers: int) -> Tensor:
        """(numbers,) int32: where the rows end whose key is 0, 1, 2, …"""
        all_keys = torch.arange(numbers, device=self.keys.device)
        return torch.searchsorted(self.keys, all_keys, right=True, out_int32=True)


def reordered(rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
    """The copies of rows (N, D), sorted; if it `joins`, the sums of sorted copies (N * copies, D)."""
    return (Reordered.apply if torch.is_grad_enabled() else _reordered)(rows, order, joins)


def _reordered(rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
    copies = order.copies
    if not joins:
        return rows.index_select(0, order.places // copies if copies > 1 else order.places)
    unsorted = torch.empty_like(rows).index_copy_(0, order.places, rows)
    return unsorted if copies == 1 else unsorted.unflatten(0, (len(rows) // copies, copies)).sum(1)


class Reordered(torch.autograd.Function):
    """`reordered`. The gradient of sorted copies is the sum of copies, and the other way round."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: TokenOrder, joins: bool) -> Tensor:
        ctx.order = order
        ctx.joins = joins
        return _reordered(rows, order, joins)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Reordered.apply(gradient, ctx.order, not ctx.joins), None, None


class ExpertExchange:
    """Rows sorted by expert that travel to the ranks of their experts.

    `counts_X` are this rank's rows of every expert. Afterwards `experts` (Z) says for which expert here each
    received row is, and `counts` how many rows each expert here has. Collective; the host waits once, for the
    numbers.
    """

    def __init__(self, counts_X: Tensor, group: dist.ProcessGroup):
        self._group, ranks = group, group.size()
        sent = counts_X.view(ranks, -1)
        received = torch.empty_like(sent)  # [rank, expert]: rows that the rank has for an expert of mine
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        of_experts = torch.stack((counts_X, received.flatten())).cpu().view(2, ranks, -1)
        self._sent, self._received = of_experts.sum(2).tolist()
        self.counts: list[int] = of_experts[1].sum(0).tolist()
        numbers = torch.arange(received.shape[1], device=received.device).repeat(ranks)
        self.experts = numbers.repeat_interleave(received.flatten(), output_size=sum(self._received))

    def there(self, rows: Tensor) -> Tensor:
        return all_to_all(self._group, rows, self._received, self._sent)

    def back(self, rows: Tensor) -> Tensor:
        return all_to_all(self._group, rows, self._sent, self._received)
