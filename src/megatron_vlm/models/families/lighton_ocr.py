"""LightOnOCR: Mistral 3's tower, a projector with a norm before it, and a Qwen3."""

from torch import nn
from transformers.models.lighton_ocr.modeling_lighton_ocr import LightOnOcrMultiModalProjector

from megatron_vlm.models.families import mistral3
from megatron_vlm.models.family_parts import llama


class LightOnOcr(mistral3.Mistral3):
    model_type = "lighton_ocr"
    top_limits = {}
    uses_part = False
    renames = ()
    vision_keys = {
        "vision_tower.**": "model.vision_encoder.**",
        "multi_modal_projector.**": "model.vision_projection.**",
    }
    hf_model = llama.LlamaFamily.hf_model
    hf_head = llama.LlamaFamily.hf_head

    def vision_modules(self) -> nn.Module:
        return mistral3.PixtralVision(self.vision, LightOnOcrMultiModalProjector(self.hf_config))
