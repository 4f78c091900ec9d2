"""Mixture of experts out of Megatron's own layer: what our families need of it that it does not do itself.

Experts are never cut by tensor parallelism: those of our families are a few hundred channels wide. Expert
parallelism spreads them over the tensor- and data-parallel ranks alike, each of which holds whole experts.
"""

from __future__ import annotations

from functools import partial

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor


class Router(TopKRouter):
    """Top-k routing whose selection bias is a weight of the checkpoint: read, saved, never updated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True
        self.trained_tokens: Tensor | int = 0  # of the current micro batch

    def attach_and_log_load_balancing_loss(self, *args, **kwargs) -> Tensor:
        """As Megatron's, but weighing a micro batch's balance by its trained tokens, like all of its loss.

        Megatron weighs it by all tokens, while gradients are divided by the trained ones: the coefficient
        would grow with every prompt token.
        """
        kwargs["valid_token_count"] = self.trained_tokens / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron counts tokens here for an update of the bias (and, in 0.19, fails on a padding mask)."""


class Experts(SequentialMLP):
    """This rank's experts, one after the other.

    Megatron reduces their gradients over its own group for experts, and gives them an optimizer of their
    own, only where that group differs from the data-parallel one. Always doing so changes no number and lets
    a checkpoint go from any expert parallelism to any other.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for param in self.parameters():
            param.allreduce = False


def moe_mlp() -> partial[MoELayer]:
    """A layer's MLP with routed experts and, where the config has them, shared ones."""
    linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=partial(Experts, submodules=linears),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
            router=Router,
        ),
    )


def balancing_settings(coefficient: float, moe_layers: int, topk: int) -> dict:
    """The load-balancing loss of Transformers (Switch, arXiv 2101.03961) in Megatron's words; 0: none.

    Transformers balances all layers as one and counts a token once for each of its experts, Megatron sums
    over layers and counts it once: scaled so, one layer's loss is the same, several layers' the mean.
    """
    if not coefficient:
        return {"moe_router_load_balancing_type": "none"}
    return {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": coefficient * topk / moe_layers,
    }
