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
