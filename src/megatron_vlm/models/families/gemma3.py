"""Gemma3: SigLIP tower, average-pooling projector, 5:1 local/global layers, images seen both ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.families import llama, llava
from megatron_vlm.models.families.base import Family
from megatron_vlm.models.rotary import Rotary, inverse_frequencies
from megatron_vlm.models.weights import Rule, Whole

LAYER_TYPES = ("full_attention", "sliding_attention")  # index: rotary rule of the layer


def architecture(hf_config: Any) -> dict:
    text = hf_config.text_config
    return llama.architecture(hf_config) | {
        "softmax_scale": text.query_pre_attn_scalar**-0.5,
        "activation_func": partial(nn.functional.gelu, approximate="tanh"),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "norm_after_sublayer": True,
        "embedding_scale": text.hidden_size**0.5,
        "layer_windows": tuple(
            text.sliding_window if kind == "sliding_attention" else None for kind in text.layer_types
        ),
        "layer_rotary": tuple(LAYER_TYPES.index(kind) for kind in text.layer_types),
    }


def rotary(hf_config: Any) -> Rotary:
    return Rotary([inverse_frequencies(hf_config.text_config, kind) for kind in LAYER_TYPES])


class Gemma3Vision(nn.Module):
    """The HF tower and projector: pixel_values (N, 3, H, W) -> features (N * mm_tokens_per_image, D)."""

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = AutoModel.from_config(
            hf_config.vision_config, attn_implementation="sdpa", trust_remote_code=False
        )
        self.multi_modal_projector = Gemma3MultiModalProjector(hf_config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values.to(self.multi_modal_projector.mm_input_projection_weight.dtype)
        hidden_NPE = self.vision_tower(pixel_values=pixels).last_hidden_state
        return self.multi_modal_projector(hidden_NPE).flatten(0, 1)


def blank_image(hf_config: Any, pixels: int) -> dict[str, Tensor]:
    """The tower takes one size of image."""
    side = hf_config.vision_config.image_size
    return {"pixel_values": torch.zeros(1, hf_config.vision_config.num_channels, side, side)}


def visual_tokens(hf_config: Any, visual: GenericVisualInputs) -> list[int]:
    return [hf_config.mm_tokens_per_image] * len(visual.pixel_values)


def weights(hf_config: Any) -> list[Rule]:
    norms_after = {"self_attn_bda": "post_attention_layernorm", "mlp_bda": "post_feedforward_layernorm"}
    return [
        *llava.outer_rules(hf_config),
        *llama.attention_rules(hf_config.text_config, llava.LAYER, qk_norm=True),
        *llama.mlp_rules(llava.LAYER, norm="pre_feedforward_layernorm"),
        *[
            llama.layer_rule(llava.LAYER, f"{ours}.norm.weight", (f"{theirs}.weight",), Whole())
            for ours, theirs in norms_after.items()
        ],
    ]


FAMILY = Family(
    model_type="gemma3",
    visual_keys=("pixel_values",),
    architecture=architecture,
    rotary=rotary,
    build_vision=Gemma3Vision,
    blank_image=blank_image,
    visual_tokens=visual_tokens,
    weights=weights,
    renames=llava.RENAMES,
    bidirectional_images=True,
)
