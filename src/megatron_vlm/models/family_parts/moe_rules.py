"""Weights and keys that families with a mixture of experts share."""

from collections.abc import Iterable
from typing import Any

from megatron_vlm.models.family_parts import limits
from megatron_vlm.models.family_parts.llama import LlamaFamily
from megatron_vlm.models.weights.rules import Cut, GatedMLP, Rule, Whole

LIMITS = {"moe_intermediate_size": limits.SIZE, "router_aux_loss_coef": limits.ANY}


def chosen(experts: str) -> limits.Limit:
    """How many experts a token takes; `experts` is the key of their number."""
    return limits.Limit(f"1 to {experts}", lambda count, text: 1 <= count <= getattr(text, experts))


DEEPSEEK = LIMITS | {
    **dict.fromkeys(("n_routed_experts", "topk_group", "first_k_dense_replace"), limits.NUMBER),
    "output_router_logits": limits.only(False),
    "routed_scaling_factor": limits.Limit("any but 0", lambda factor, text: factor != 0),  # Megatron: 1
    "norm_topk_prob": limits.only(True),
    "n_shared_experts": limits.Limit("at least 1", lambda count, text: count >= 1),
    "num_experts_per_tok": chosen("n_routed_experts"),
}


def deepseek(text: Any) -> dict:
    """Fields of LanguageModelConfig for DeepSeek's experts: after the first layers, beside shared ones."""
    layers = [layer >= text.first_k_dense_replace for layer in range(text.num_hidden_layers)]
    return {
        **architecture(text, text.n_routed_experts, layers),
        "moe_shared_expert_intermediate_size": text.moe_intermediate_size * text.n_shared_experts,
        "moe_router_topk_scaling_factor": text.routed_scaling_factor,
    }


def _groups(count: Any, text: Any) -> bool:
    """Whether Megatron and Transformers choose the same groups of experts. Megatron ranks a group by its best
    topk / topk_group experts, Transformers by its best two."""
    even = 0 < text.topk_group <= count <= text.n_routed_experts // 2 and text.n_routed_experts % count == 0
    return even and (count == text.topk_group or text.num_experts_per_tok == 2 * text.topk_group)


SIGMOID = {"n_group": limits.Limit("topk_group, or any if num_experts_per_tok is twice that", _groups)}


def sigmoid(text: Any) -> dict:
    """Fields of LanguageModelConfig for `deepseek` whose router takes sigmoids, a bias and groups."""
    limit = {"moe_router_num_groups": text.n_group, "moe_router_group_topk": text.topk_group}
    return {
        **deepseek(text),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        **({} if text.n_group == text.topk_group else limit),
    }


def sigmoid_rules(family: LlamaFamily) -> list[Rule]:
    """Rules for `sigmoid`, and for the layers before."""
    bias = ["mlp.gate.e_score_correction_bias"]
    return [*deepseek_rules(family), family.layer_rule("mlp.router.expert_bias", bias, Whole())]


def after_the_last(family: LlamaFamily) -> dict[str, str]:
    """The keys of layers of multi-token prediction, to be carried."""
    layer = f"{family.hf_model}layers.{family.text.num_hidden_layers}."
    return {layer + "**": "multi-token prediction, which Transformers leaves out too"}


def deepseek_rules(family: LlamaFamily) -> list[Rule]:
    """Rules for `deepseek`, and for the layers before."""
    dense = LlamaFamily.feed_forward_rules(family)
    return [*dense, *rules(family, family.text.n_routed_experts), *shared_rules(family)]


def architecture(text: Any, experts: int, layers: Iterable[bool] | None = None) -> dict:
    """Fields of LanguageModelConfig for so many experts, in all layers or in some of them."""
    # Transformers 5.17 has no field in all of these configs that switches the load-balancing loss on
    balances = getattr(text, "output_router_logits", False)
    return {
        "num_moe_experts": experts,
        "moe_layer_freq": [*map(int, layers or [True] * text.num_hidden_layers)],
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_aux_loss_coeff": text.router_aux_loss_coef if balances else 0.0,
    }


def rules(family: LlamaFamily, experts: int) -> list[Rule]:
    """Rules for router and routed experts of every layer that has them.

    A checkpoint fuses the experts of a layer into one tensor per projection, transposed or not, or stores
    them one by one.
    """
    rule, ours, prefix = family.layer_rule, "mlp.experts.*.linear_", "mlp.experts.*."
    gate_up = [prefix + "gate_proj.weight", prefix + "up_proj.weight"]
    return [
        rule("mlp.router.weight", ["mlp.gate.weight"], Whole()),
        *fused_rules(family, experts, "mlp.experts."),
        rule(ours + "fc1", gate_up, GatedMLP()),
        rule(ours + "fc2", [prefix + "down_proj.weight"], Whole()),
    ]


def fused_rules(family: LlamaFamily, experts: int, hf_prefix: str) -> list[Rule]:
    """Rules for the tensors of experts, which are fused."""
    hidden, ffn = family.text.hidden_size, family.text.moe_intermediate_size
    return [
        family.layer_rule(
            f"mlp.experts.*.linear_{ours}", [hf_prefix + hf_name], Whole(), rows=experts, row_shape=shape
        )
        for ours, hf_name, shape in (
            ("fc1", "gate_up_proj", (2 * ffn, hidden)),
            ("fc2", "down_proj", (hidden, ffn)),
        )
    ]


def shared_rules(family: LlamaFamily, hf_prefix: str = "mlp.shared_experts.") -> list[Rule]:
    """Rules for the shared experts, which every token passes: one MLP, which tensor parallelism cuts."""
    ours = "mlp.shared_experts.linear_"
    gate_up = [hf_prefix + "gate_proj.weight", hf_prefix + "up_proj.weight"]
    return [
        family.layer_rule(ours + "fc1.weight", gate_up, GatedMLP()),
        family.layer_rule(ours + "fc2.weight", [hf_prefix + "down_proj.weight"], Cut(1)),
    ]
