"""Qwen2.5-VL: window-attention tower, qkv bias, M-RoPE in chunks with the seconds of videos.

Text after a video continues one after the video's largest position, as in Qwen's own code and Transformers 4.
Transformers 5 continues at the video's start plus its longer merged side, whatever its time axis reaches.
"""

from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import limits, llama, patch_towers, towers

MROPE = patch_towers.MRope(sections=(16, 24, 24))


class Qwen25VL(patch_towers.PatchFamily):
    model_type = "qwen2_5_vl"
    box_format = "bbox_2d_pixels"
    text_limits = limits.WINDOWS | {"head_dim": limits.WHOLE_HEADS}
    visual_keys = (*patch_towers.VISUAL_KEYS, "second_per_grid_ts")
    mrope = MROPE
    tower_class = Qwen2_5_VisionTransformerPretrainedModel
    vision_keys = {"visual.**": "visual.**"}
    hf_model = "model."
    renames = ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model."))
    groups = Description.groups | {
        "tower": ("vision.visual.patch_embed.", "vision.visual.blocks."),
        "projector": ("vision.visual.merger.",),
    }

    def tower(self) -> PreTrainedModel:
        return towers.tower_of_class(self.tower_class, self.vision)

    @property
    def tokens_per_second(self) -> float:
        return self.vision.tokens_per_second

    @property
    def architecture(self) -> dict:
        fields = {"add_qkv_bias": True, "layer_windows": llama.layer_windows(self.text)}
        return llama.architecture(self.text, self.tied) | fields
