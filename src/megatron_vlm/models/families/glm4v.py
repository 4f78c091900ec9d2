"""GLM-4.1V-Thinking and GLM-4.6V-Flash: dense, norms around each sub-layer, rotary pairs of neighbours."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import limits, llama, patch_towers
from megatron_vlm.models.positions import IMAGE, VIDEO
from megatron_vlm.parallel.setup import on_device

MROPE = patch_towers.MRope(sections=(8, 12, 12), part_of_head=True)


class Glm4vVision(patch_towers.GridVision):
    """The HF visual module; it treats every frame of a video as an image."""

    def __init__(self, visual: PreTrainedModel):
        super().__init__(visual, deepstack=0)
        self.visual.embeddings.register_forward_pre_hook(_sizes_to_device)

    def forward(self, *, video_grid_thw: Tensor | None = None, **visual: Tensor) -> Tensor:
        if video_grid_thw is not None:
            video_grid_thw = torch.repeat_interleave(video_grid_thw, video_grid_thw[:, 0], dim=0)
            video_grid_thw = torch.nn.functional.pad(video_grid_thw[:, 1:], (1, 0), value=1)
        return super().forward(video_grid_thw=video_grid_thw, **visual)


def _sizes_to_device(module: nn.Module, arguments: tuple) -> tuple:
    """Moves images' lengths and grids to the device: the position embeddings read them there, the rest of the
    tower on the host."""
    hidden_states, lengths, grids_N3, *more = arguments
    lengths, grids_N3 = (on_device(sizes, hidden_states.device) for sizes in (lengths, grids_N3))
    return hidden_states, lengths, grids_N3, *more


class GlmFamily(patch_towers.PatchFamily):
    """A family with this tower, these placeholders and this M-RoPE."""

    box_format = "begin_of_box"
    mrope = MROPE
    groups = Description.groups | {
        "tower": (
            *(f"vision.visual.{part}." for part in ("embeddings", "patch_embed", "blocks")),
            *(f"vision.visual.{norm}." for norm in ("post_conv_layernorm", "post_layernorm")),
        ),
        "projector": ("vision.visual.downsample.", "vision.visual.merger."),
    }
    images_or_videos = True

    def vision_modules(self) -> Glm4vVision:
        return Glm4vVision(self.tower())

    def visual_kinds(self, input_ids: Any) -> Any:
        """A placeholder belongs to a video frame if a begin-of-video token before it is not yet closed."""
        video_starts = (input_ids == self.hf_config.video_start_token_id).cumsum(-1)
        video_ends = (input_ids == self.hf_config.video_end_token_id).cumsum(-1)
        return (input_ids == self.hf_config.image_token_id) * (
            IMAGE + (VIDEO - IMAGE) * (video_starts > video_ends)
        )


class Glm4v(GlmFamily):
    model_type = "glm4v"
    text_limits = {"head_dim": limits.WHOLE_HEADS}
    norms_after = {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
    fused_mlp = True

    @property
    def architecture(self) -> dict:
        return llama.architecture(self.text, self.tied) | {
            "add_qkv_bias": True,
            "norm_after_sublayer": True,
            "rotary_interleaved": True,
        }
