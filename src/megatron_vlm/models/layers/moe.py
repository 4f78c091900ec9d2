"""Mixture of experts from Megatron's own layer, with what our families need beyond it.

Tensor parallelism never cuts experts: those of our families are a few hundred channels wide. Expert
parallelism spreads them over tensor- and data-parallel ranks alike; each rank holds whole experts.
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
    """Top-k routing with a selection bias from the checkpoint, which is read and saved but never updated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True
        self.trained_tokens = 0  # of the current micro batch, on all ranks of context parallelism

    def attach_and_log_load_balancing_loss(self, *args, **kwargs) -> Tensor:
        """Megatron's method, with the balance of a micro batch weighted by its trained tokens, like its loss.

        Megatron weights it by all tokens, while gradients are divided by the trained ones: the coefficient
        would grow with every prompt token.
        """
        kwargs["valid_token_count"] = self.trained_tokens / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Does nothing. Megatron counts tokens here to update the bias (and 0.19 fails on a padding mask)."""


class Experts(SequentialMLP):
    """This rank's experts, one after the other.

    Megatron reduces their gradients over a group for experts, and gives them their own optimizer, only if
    that group differs from the data-parallel one. Here it always does both. This changes no number and lets a
    checkpoint go from any expert parallelism to any other.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for param in self.parameters():
            param.allreduce = False


def moe_mlp() -> partial[MoELayer]:
    """A layer's MLP with routed experts and, if the config has them, shared ones."""
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
    """Megatron's settings for the load-balancing loss of Transformers (Switch, arXiv 2101.03961); 0: none.

    Transformers balances all layers as one and counts a token once for each of its experts; Megatron sums
    over layers and counts a token once. So the coefficient is scaled: one layer has the same loss as in
    Transformers, several have the mean.
    """
    if not coefficient:
        return {"moe_router_load_balancing_type": "none"}
    return {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": coefficient * topk / moe_layers,
    }
