"""GLM-4.5V: partial chunked M-RoPE, sigmoid router with a selection bias, shared expert, video by frames."""

from typing import Any

from megatron_vlm.models.family_parts import glm4v, keys, llama, moe_rules
from megatron_vlm.models.weights.rules import Rule, Whole


def _groups(count: Any, text: Any) -> bool:
    """Whether Megatron and Transformers choose the same groups of experts. Megatron ranks a group by its best
    topk / topk_group experts, Transformers by its best two."""
    even = 0 < text.topk_group <= count <= text.n_routed_experts // 2 and text.n_routed_experts % count == 0
    return even and (count == text.topk_group or text.num_experts_per_tok == 2 * text.topk_group)


SECTIONS = glm4v.sections(
    "glm4v_moe",
    keys.Section(
        ("glm4v_moe_text",),
        keys.text()
        | moe_rules.TEXT
        | keys.any_of("attention_bias", "n_routed_experts", "num_local_experts", "topk_group")
        | keys.any_of("first_k_dense_replace")
        | {
            "routed_scaling_factor": keys.Values(
                "any but 0", lambda factor, text: factor != 0
            ),  # Megatron: 1
            "norm_topk_prob": keys.only(True),
            "n_shared_experts": keys.Values("at least 1", lambda count, text: count >= 1),
            "num_experts_per_tok": moe_rules.chosen("n_routed_experts"),
            "n_group": keys.Values("topk_group, or any if num_experts_per_tok is twice that", _groups),
        },
        rope=glm4v.MROPE.keys(),
    ),
    *("glm4v_moe_vision", "glm4v_moe"),
)


class Glm4vMoe(glm4v.GlmFamily):
    model_type = "glm4v_moe"
    sections = SECTIONS
    has_experts = True
    peft_experts = ("gate_proj", "up_proj", "down_proj", "gate")

    @property
    def architecture(self) -> dict:
        text = self.text
        layers = [layer >= text.first_k_dense_replace for layer in range(text.num_hidden_layers)]
        return llama.architecture(text, self.tied) | {
            "add_qkv_bias": text.attention_bias,
            **moe_rules.architecture(text, text.n_routed_experts, layers),
            "moe_shared_expert_intermediate_size": text.moe_intermediate_size * text.n_shared_experts,
            "moe_router_topk_scaling_factor": text.routed_scaling_factor,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            **_group_limit(text),
        }

    def feed_forward_rules(self) -> list[Rule]:
        text = self.text
        bias = ["mlp.gate.e_score_correction_bias"]
        return [
            *super().feed_forward_rules(),
            *moe_rules.rules(self, text.n_routed_experts),
            *moe_rules.shared_rules(self),
            self.layer_rule("mlp.router.expert_bias", bias, Whole()),
        ]

    @property
    def carried_keys(self) -> dict[str, str]:
        after_the_last = f"{self.hf_model}layers.{self.text.num_hidden_layers}."
        return {after_the_last + "**": "multi-token prediction, which Transformers leaves out too"}


def _group_limit(text: Any) -> dict:
    if text.n_group == text.topk_group:
        return {}
    return {"moe_router_num_groups": text.n_group, "moe_router_group_topk": text.topk_group}
