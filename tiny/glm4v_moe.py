"""A tiny glm4v_moe."""

from __future__ import annotations

from transformers import Glm4vMoeConfig, Glm4vProcessor

from tiny import glm
from tiny.family import DEMO_TEXT, DEMO_TOWER, TinyFamily


def config(processor: Glm4vProcessor, text: dict, vision: dict) -> Glm4vMoeConfig:
    """`text` and `vision` override the toy sizes; experts come in groups, as the router's code supports."""
    experts = {
        "attention_bias": True,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    }
    return glm.config(Glm4vMoeConfig, processor, experts | text, vision)


FAMILY = TinyFamily(
    glm.TEMPLATE,
    glm.processor,
    config,
    demo={
        "image_size": 56,
        "text": {
            **DEMO_TEXT,
            "hidden_size": 96,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
        },
        # also the width of the tower's MLPs: with 64 it learns slowly
        "vision": {**DEMO_TOWER, "out_hidden_size": 96},
    },
    published={"image_size": 2425},
)
