"""Qwen2-VL: Qwen2.5-VL's language model; its tower has no windows, and videos have no seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from megatron_vlm.models.families import qwen2_5_vl
from megatron_vlm.models.family_parts import patch_towers
from megatron_vlm.models.positions import kinds_by_token, mrope_positions


class Qwen2VLVision(patch_towers.GridVision):
    """The HF visual module, of which `AutoModel` does not know."""

    @staticmethod
    def tower(vision_config: Any) -> PreTrainedModel:
        return Qwen2VisionTransformerPretrainedModel._from_config(vision_config, attn_implementation="sdpa")


def position_ids(hf_config: Any) -> partial:
    """A moment of a video, whatever lies between two of them, is one step of time."""
    merge_size = hf_config.vision_config.spatial_merge_size
    return partial(
        mrope_positions, kinds=kinds_by_token(hf_config), merge_size=merge_size, tokens_per_second=1
    )


FAMILY = replace(
    qwen2_5_vl.FAMILY,
    model_type="qwen2_vl",
    sections=qwen2_5_vl.sections("qwen2_vl", "embed_dim", "mlp_ratio"),
    visual_keys=patch_towers.VISUAL_KEYS,
    build_vision=Qwen2VLVision,
    position_ids=position_ids,
)
