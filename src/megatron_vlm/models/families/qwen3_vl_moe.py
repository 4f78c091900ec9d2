"""Qwen3-VL with a mixture of experts: Qwen3-VL but for the feed-forwards."""

from megatron_vlm.models.families import qwen3_vl
from megatron_vlm.models.family_parts import keys, moe_rules, patch_towers
from megatron_vlm.models.weights.rules import Rule

SECTIONS = keys.sections(
    keys.Section(("qwen3_vl_moe",), patch_towers.TOP, no_effect=qwen3_vl.MARKERS),
    keys.Section(
        ("qwen3_vl_moe_text",),
        qwen3_vl.TEXT
        | moe_rules.TEXT
        | dict.fromkeys(("num_experts", "num_local_experts"), keys.NUMBER)
        | keys.any_of("decoder_sparse_step", "mlp_only_layers")
        | {
            "num_experts_per_tok": keys.Values(
                "1 to num_experts", lambda count, text: not text.num_experts or 1 <= count <= text.num_experts
            )
        },
        no_effect=("sliding_window",),  # Transformers sets it and never looks at it
        rope=qwen3_vl.MROPE.keys(),
    ),
    keys.Section(("qwen3_vl_moe_vision", "qwen3_vl_moe"), qwen3_vl.VISION),
)


class Qwen3VLMoe(qwen3_vl.Qwen3VL):
    model_type = "qwen3_vl_moe"
    sections = SECTIONS
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
