"""Qwen3.5 with a mixture of experts in every layer, beside a shared expert with a gate of its own."""

from megatron_vlm.models.families import qwen3_5
from megatron_vlm.models.family_parts import limits, moe_rules
from megatron_vlm.models.weights.rules import Rule, Whole


class Qwen35Moe(qwen3_5.Qwen35):
    model_type = "qwen3_5_moe"
    text_limits = {
        **qwen3_5.TEXT,
        **moe_rules.LIMITS,
        **dict.fromkeys(("num_experts", "shared_expert_intermediate_size"), limits.SIZE),
        "num_experts_per_tok": moe_rules.chosen("num_experts"),
    }
    has_experts = True

    @property
    def architecture(self) -> dict:
        text = self.text
        return super().architecture | {
            **moe_rules.architecture(text, text.num_experts),
            "moe_shared_expert_intermediate_size": text.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }

    def feed_forward_rules(self) -> list[Rule]:
        gate = self.layer_rule("mlp.shared_experts.gate.weight", ["mlp.shared_expert_gate.weight"], Whole())
        return [
            *self.norm_rules({"pre_mlp_layernorm": self.norm_before_mlp}),
            *moe_rules.rules(self, self.text.num_experts),
            *moe_rules.shared_rules(self, "mlp.shared_expert."),
            gate,
        ]
