"""Qwen3-VL: q/k norm, deepstack, interleaved M-RoPE, videos with the time in their text."""

from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import keys, llama, patch_towers

MROPE = patch_towers.MRope(sections=(24, 20, 20), interleaved=True)
TEXT = keys.text() | keys.any_of("attention_bias")
TEXT["layer_types"] = keys.Values(  # Transformers takes each layer's, where there are any
    '"full_attention" for each layer',
    lambda kinds, text: set(kinds) <= {"full_attention"} and len(kinds) >= text.num_hidden_layers,
)
VISION = patch_towers.VISION | keys.any_of("num_position_embeddings", "deepstack_visual_indexes")
MARKERS = ("vision_start_token_id", "vision_end_token_id")  # only the processor needs them
SECTIONS = keys.sections(
    keys.Section(("qwen3_vl",), patch_towers.TOP, no_effect=MARKERS),
    keys.Section(("qwen3_vl_text",), TEXT, rope=MROPE.keys()),
    keys.Section(("qwen3_vl_vision", "qwen3_vl"), VISION),
)


class Qwen3VL(patch_towers.PatchFamily):
    model_type = "qwen3_vl"
    box_format = "bbox_2d"
    sections = SECTIONS
    mrope = MROPE
    vision_keys = {"visual.**": "model.visual.**"}
    groups = Description.groups | {
        "tower": ("vision.visual.patch_embed.", "vision.visual.pos_embed.", "vision.visual.blocks."),
        "projector": ("vision.visual.merger.", "vision.visual.deepstack_merger_list."),
    }

    @property
    def architecture(self) -> dict:
        return llama.architecture(self.text, self.tied) | {
            "qk_layernorm": True,
            **llama.attention_bias(self.text),
            "deepstack_layers": self.deepstack_features,
        }
