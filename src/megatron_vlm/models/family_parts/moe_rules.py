"""Weights and keys that families with a mixture of experts share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_vlm.models.family_parts import keys
from megatron_vlm.models.family_parts.llama import layer_rule
from megatron_vlm.models.weights.rules import Cut, GatedMLP, Rule, Whole

TEXT = keys.any_of("output_router_logits", "router_aux_loss_coef")
TEXT |= {"moe_intermediate_size": keys.SIZE}


def balance(text: Any) -> float:
    """The weight of the load-balancing loss. Transformers up to 5.12 has no field that switches it on."""
    return text.router_aux_loss_coef if getattr(text, "output_router_logits", False) else 0.0


def rules(hf_layer: str, experts: int, hidden: int, ffn: int) -> list[Rule]:
    """Rules for router and routed experts of every layer that has them; `hf_layer` ends in `layers.*.`

    A checkpoint fuses the experts of a layer into one tensor per projection, transposed or not, or stores
    them one by one.
    """
    fc1 = "mlp.experts.*.linear_fc1"
    fc2 = "mlp.experts.*.linear_fc2"
    one = "mlp.experts.*."
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return [
        layer_rule(hf_layer, "mlp.router.weight", ("mlp.gate.weight",), Whole()),
        fused(layer_rule(hf_layer, fc1, (gate_up,), Whole()), experts, (2 * ffn, hidden)),
        fused(layer_rule(hf_layer, fc2, (down,), Whole()), experts, (hidden, ffn)),
        layer_rule(hf_layer, fc1, (one + "gate_proj.weight", one + "up_proj.weight"), GatedMLP()),
        layer_rule(hf_layer, fc2, (one + "down_proj.weight",), Whole()),
    ]


def fused(rule: Rule, experts: int, shape: tuple[int, int]) -> Rule:
    return replace(rule, rows=experts, row_shape=shape)


def shared_rules(hf_layer: str) -> list[Rule]:
    """Rules for the shared experts, which every token passes: one MLP, which tensor parallelism cuts."""
    ours, theirs = "mlp.shared_experts.linear_", "mlp.shared_experts."
    gate_up = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    return [
        layer_rule(hf_layer, ours + "fc1.weight", gate_up, GatedMLP()),
        layer_rule(hf_layer, ours + "fc2.weight", (theirs + "down_proj.weight",), Cut(1)),
    ]
