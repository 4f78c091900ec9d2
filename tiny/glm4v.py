"""A tiny glm4v."""

from __future__ import annotations

from transformers import Glm4vConfig, PretrainedConfig, ProcessorMixin

from tiny import glm
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
# heads of 16 channels; out_hidden_size is also the width of the tower's MLPs: with 64 it learns slowly
DEMO = {
    "image_size": 56,
    "text": {**DEMO_TEXT, "hidden_size": 96, "num_attention_heads": 6},
    "vision": {**DEMO_TOWER, "out_hidden_size": 96},
}


def config(processor: ProcessorMixin, text: dict, vision: dict, kind: type = Glm4vConfig) -> PretrainedConfig:
    """`text` and `vision` override the toy sizes."""
    return glm.config(kind, processor, {"rope_parameters": ROPE} | text, vision)


FAMILY = TinyFamily(glm.TEMPLATE, glm.processor, config, demo=DEMO, published={"image_size": 2425})
