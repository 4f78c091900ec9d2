"""What families with a mixture of experts have in common."""

from __future__ import annotations

from megatron_vlm.models.weights import FusedGatedMLP, GatedMLP, Rule, Shard, Whole


def expert_rules(hf_layers: str, experts: int, hidden: int, ffn: int) -> list[Rule]:
    """Rules for router and routed experts of the layers that HF names `hf_layers` + number.

    The experts of a layer are fused into one HF tensor per projection, either way round, as Transformers
    holds them in memory, or stored one by one.
    """
    ours, theirs = "language_model.decoder.layers.*.mlp.", hf_layers + "*.mlp."
    fc1 = ours + "experts.local_experts.*.linear_fc1.weight"
    fc2 = ours + "experts.local_experts.*.linear_fc2.weight"
    fused, one = theirs + "experts.", theirs + "experts.*."
    return [
        Rule(ours + "router.weight", (theirs + "gate.weight",), Whole()),
        Rule(fc1, (fused + "gate_up_proj",), FusedGatedMLP(), rows=experts, row_shape=(2 * ffn, hidden)),
        Rule(fc2, (fused + "down_proj",), Whole(), rows=experts, row_shape=(hidden, ffn)),
        Rule(fc1, (one + "gate_proj.weight", one + "up_proj.weight"), GatedMLP()),
        Rule(fc2, (one + "down_proj.weight",), Whole()),
    ]


def shared_expert_rules(hf_layers: str) -> list[Rule]:
    """Rules for the experts that every token passes, one MLP together; tensor parallelism cuts it."""
    ours = "language_model.decoder.layers.*.mlp.shared_experts.linear_"
    theirs = hf_layers + "*.mlp.shared_experts."
    gated = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    return [
        Rule(ours + "fc1.weight", gated, GatedMLP()),
        Rule(ours + "fc2.weight", (theirs + "down_proj.weight",), Shard(1)),
    ]
