"""Qwen2-VL: Qwen2.5-VL's language model; its tower has no windows, and videos have no seconds."""

from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from megatron_vlm.models.families import qwen2_5_vl
from megatron_vlm.models.family_parts import patch_towers


class Qwen2VL(qwen2_5_vl.Qwen25VL):
    model_type = "qwen2_vl"
    box_format = "box_tokens"
    visual_keys = patch_towers.VISUAL_KEYS
    tokens_per_second = 1  # a moment is one step of time, whatever lies between two of them
    tower_class = Qwen2VisionTransformerPretrainedModel
