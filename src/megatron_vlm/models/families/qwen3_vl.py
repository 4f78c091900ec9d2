"""Qwen3-VL: q/k norm, deepstack, interleaved M-RoPE, videos with the time in their text."""

from megatron_vlm.models.family_parts import limits, llama, patch_towers

MROPE = patch_towers.MRope(sections=(24, 20, 20), interleaved=True)
LAYERS = limits.Limit(  # Transformers takes each layer's, where there are any
    '"full_attention" for each layer',
    lambda kinds, text: set(kinds) <= {"full_attention"} and len(kinds) >= text.num_hidden_layers,
)


class Qwen3VL(patch_towers.PatchFamily):
    model_type = "qwen3_vl"
    box_format = "bbox_2d"
    text_limits = {"layer_types": LAYERS}
    mrope = MROPE
    groups = patch_towers.PatchFamily.groups | {
        "projector": ("vision.visual.merger.", "vision.visual.deepstack_merger_list."),
    }

    @property
    def architecture(self) -> dict:
        return llama.architecture(self.text, self.tied) | {
            "qk_layernorm": True,
            **llama.attention_bias(self.text),
            "deepstack_layers": self.deepstack_features,
        }
