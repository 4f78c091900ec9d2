"""GLM-4.5V: partial chunked M-RoPE, sigmoid router with a selection bias, shared expert, video by frames."""

from megatron_vlm.models.families import glm4v
from megatron_vlm.models.family_parts import limits, llama, moe_rules


class Glm4vMoe(glm4v.GlmFamily):
    model_type = "glm4v_moe"
    text_limits = moe_rules.DEEPSEEK | moe_rules.SIGMOID | {"output_router_logits": limits.ANY}
    has_experts = True
    carried_keys = property(moe_rules.after_the_last)
    feed_forward_rules = moe_rules.sigmoid_rules
    peft_experts = ("gate_proj", "up_proj", "down_proj", "gate")

    @property
    def architecture(self) -> dict:
        text = self.text
        fields = {"add_qkv_bias": text.attention_bias, **moe_rules.sigmoid(text)}
        return llama.architecture(text, self.tied) | fields
