"""GLM-4.1V-Thinking and GLM-4.6V-Flash: dense, norms around each sub-layer, rotary pairs of neighbours."""

from megatron_vlm.models.family_parts import glm4v, limits, llama


class Glm4v(glm4v.GlmFamily):
    model_type = "glm4v"
    text_limits = {"head_dim": limits.WHOLE_HEADS}
    norms_after = {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
    fused_mlp = True

    @property
    def architecture(self) -> dict:
        return llama.architecture(self.text, self.tied) | {
            "add_qkv_bias": True,
            "norm_after_sublayer": True,
            "rotary_interleaved": True,
        }
