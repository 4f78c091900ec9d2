"""GLM-4.1V-Thinking and GLM-4.6V-Flash: dense, norms around each sub-layer, rotary pairs of neighbours."""

from megatron_vlm.models.family_parts import glm4v, keys, llama

TEXT = keys.Section(("glm4v_text",), keys.text() | {"head_dim": keys.WHOLE_HEADS}, rope=glm4v.MROPE.keys())
VISION_TYPES = ("glm4v_vision", "glm4v")


class Glm4v(glm4v.GlmFamily):
    model_type = "glm4v"
    sections = glm4v.sections("glm4v", TEXT, *VISION_TYPES)
    norms_after = {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
    fused_mlp = True

    @property
    def architecture(self) -> dict:
        return llama.architecture(self.text, self.tied) | {
            "add_qkv_bias": True,
            "norm_after_sublayer": True,
            "rotary_interleaved": True,
        }
