"""Qwen3-VL with a mixture of experts: Qwen3-VL but for the feed-forwards."""

from megatron_vlm.models.families import qwen3_vl
from megatron_vlm.models.family_parts import limits, moe_rules
from megatron_vlm.models.weights.rules import Rule


class Qwen3VLMoe(qwen3_vl.Qwen3VL):
    model_type = "qwen3_vl_moe"
    text_limits = {
        **qwen3_vl.Qwen3VL.text_limits,
        **moe_rules.LIMITS,
        **dict.fromkeys(("num_experts", "num_local_experts"), limits.NUMBER),
        "num_experts_per_tok": limits.Limit(
            "1 to num_experts", lambda count, text: not text.num_experts or 1 <= count <= text.num_experts
        ),
        **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), limits.ANY),
        "sliding_window": limits.UNUSED,  # Transformers sets it and never looks at it
    }
    has_experts = True

    @property
    def architecture(self) -> dict:
        text = self.text
        if not text.num_experts:
            return super().architecture
        layers = [
            layer not in text.mlp_only_layers and (layer + 1) % text.decoder_sparse_step == 0
            for layer in range(text.num_hidden_layers)
        ]
        return super().architecture | moe_rules.architecture(text, text.num_experts, layers)

    def feed_forward_rules(self) -> list[Rule]:
        return [*super().feed_forward_rules(), *moe_rules.rules(self, self.text.num_experts)]
