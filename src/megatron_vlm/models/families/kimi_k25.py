"""Kimi K2.5 and K2.6: MoonViT in three dimensions, and DeepSeek-V3's text model.

An image is a clip of one frame, and a video is clips of up to four, whose patches see each other. Frames of
a clip are averaged behind the tower. Transformers 5.23 has this tower, but its model raises on clips of
several frames: it counts the features of all of them, and cannot join clips of different lengths.

The hub's files have the names of Kimi's first code. Queries, keys and values of the tower are one tensor
there, and in a head of queries or keys the channels that are turned together lie side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
    get_vision_frame_index,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, llama, patch_towers, texts, towers
from megatron_vlm.models.layers.tower_attention import use_segments
from megatron_vlm.models.weights.rules import Rule, Whole
from megatron_vlm.parallel.setup import on_device

SIDE = 2  # patches along the side of the square that a feature is made of

_TOWER = r"^(model\.vision_tower\.)"
_BLOCK = _TOWER + r"blocks\.(\d+)\."
_LAYER = r"\1layers.\2."


@dataclass(frozen=True)
class PairsOfHeads(Whole):
    """The queries or keys of so many `heads`, whole on every rank. In each head of the HF tensor the two
    channels that are turned together are neighbours; in the parameter they are half a head apart."""

    heads: int

    def views(self, param: Tensor) -> list[list[Tensor]]:
        return [[param.unflatten(0, (self.heads, 2, -1)).transpose(1, 2)]]

    def join(self, shards: list[Tensor]) -> list[Tensor]:
        return [self.views(shards[0])[0][0].flatten(0, 2)]


class ClipVision(patch_towers.PatchVision):
    """The HF tower and projector, for clips of frames."""

    def __init__(self, tower: PreTrainedModel, projector: nn.Module):
        super().__init__()
        self.vision_tower = use_segments(tower)
        self.mm_projector = projector

    def features(self, patches_PF: Tensor, grids_N3: Tensor) -> Tensor:
        tower = self.vision_tower
        hidden_PE = self._embedded(patches_PF, grids_N3)
        places_P2 = on_device(get_vision_position_ids(grids_N3, 1), patches_PF.device)
        rotary = tower.rotary_emb(hidden_PE, places_P2)
        bounds = pad(grids_N3.prod(-1).cumsum(0), (1, 0))
        longest = int(bounds.diff().max())
        for layer in tower.layers:
            hidden_PE = layer(hidden_PE, cu_seqlens=bounds, max_seqlen=longest, position_embeddings=rotary)
        squares_M4E = self._averaged(tower.final_layernorm(hidden_PE), grids_N3)
        return self.mm_projector(squares_M4E).squeeze(1)

    def _embedded(self, patches_PF: Tensor, grids_N3: Tensor) -> Tensor:
        embed = self.vision_tower.patch_embed
        places = embed.pos_emb
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids_N3,
            places.num_grid_per_side,
            mode=places.interpolation_mode,
            align_corners=places.interpolation_align_corners,
        )
        plan = {
            "interp_indices": indices,
            "interp_weights": weights,
            "frame_index": get_vision_frame_index(grids_N3),
        }
        plan = {name: on_device(numbers, patches_PF.device) for name, numbers in plan.items()}
        pixels = patches_PF.unflatten(-1, (3, *embed.proj.kernel_size)).to(embed.proj.weight.dtype)
        return embed(pixels, grids_N3, **plan)

    def _averaged(self, hidden_PE: Tensor, grids_N3: Tensor) -> Tensor:
        """(M, 4, E): the patches of each square, averaged over the frames of their clip."""
        times = grids_N3[:, 0]
        frames = grids_N3[:, 1:].repeat_interleave(times, 0).tolist()
        order_P = on_device(towers.merge_order(frames, SIDE), hidden_PE.device)
        squares_F4E = hidden_PE.index_select(0, order_P).unflatten(0, (-1, SIDE**2))
        if (times == 1).all():
            return squares_F4E
        clips = squares_F4E.split((grids_N3.prod(-1) // SIDE**2).tolist())
        averaged = [
            clip.unflatten(0, (time, -1)).mean(0) for clip, time in zip(clips, times.tolist(), strict=True)
        ]
        return torch.cat(averaged)


class KimiK25(texts.HoldsTexts, towers.GridFamily):
    model_type = "kimi_k25"
    top_limits = {
        # features are put in the place of what is embedded: the published one has no row
        "video_token_id": limits.OTHER_TOKEN,
        "projection_hidden_size": limits.Limit(
            "hidden_size of the tower", lambda width, top: width == top.vision_config.hidden_size
        ),
    }
    vision_limits = {
        **dict.fromkeys(("num_hidden_layers", "pos_emb_height", "pos_emb_time"), limits.SIZE),
        "pos_emb_width": limits.Limit("pos_emb_height", lambda side, tower: side == tower.pos_emb_height),
        "merge_kernel_size": limits.only([SIDE, SIDE], (SIDE, SIDE)),
        "head_dim": limits.WHOLE_HEADS,
    }
    visual_keys = patch_towers.VISUAL_KEYS
    has_experts = True
    # what Transformers' `conversion_mapping` says of this model; it saves layers of the text as blocks, too
    renames = (
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^mm_projector\.", "model.mm_projector."),
        (r"^(model\.mm_projector\.)proj\.0\.", r"\1in_proj."),
        (r"^(model\.mm_projector\.)proj\.2\.", r"\1out_proj."),
        (r"^vision_tower\.(encoder\.)?", "model.vision_tower."),
        (_TOWER + r"patch_embed\.pos_emb\.weight$", r"\1patch_embed.pos_emb.position_embeddings"),
        (_BLOCK + r"norm1\.", _LAYER + "norm2."),
        (_BLOCK + r"norm0\.", _LAYER + "norm1."),
        (_BLOCK + r"mlp\.fc1\.", _LAYER + "mlp.fc2."),
        (_BLOCK + r"mlp\.fc0\.", _LAYER + "mlp.fc1."),
        (_BLOCK + r"wo\.", _LAYER + "attn.proj."),
        (_BLOCK + r"wqkv\.", _LAYER + "attn.wqkv."),
    )
    vision_keys = {"vision_tower.**": "model.vision_tower.**", "mm_projector.**": "model.mm_projector.**"}
    groups = llama.LlamaFamily.groups | {"projector": ("vision.mm_projector.",)}

    @property
    def rules(self) -> list[Rule]:
        turned = PairsOfHeads(self.vision.num_attention_heads)
        fused = towers.fused_qkv("vision_tower.layers.*.attn", "wqkv", turned, turned, Whole())
        return [*super().rules, *fused]

    @property
    def merge_size(self) -> int:
        return SIDE

    def vision_modules(self) -> nn.Module:
        tower = towers.tower_of_class(Kimi_K25VisionModel, self.vision)
        return ClipVision(tower, Kimi_K25MultimodalProjection(self.hf_config))

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each image or clip."""
        of_frames = super().visual_tokens(visual)
        times = towers.joined_grids(visual)[:, 0].tolist()
        if max(times) > self.vision.pos_emb_time:
            raise ValueError(f"a clip of {max(times)} frames, and the tower takes {self.vision.pos_emb_time}")
        return [tokens // time for tokens, time in zip(of_frames, times, strict=True)]

    def tower_units(self, visual: GenericVisualInputs) -> int:
        """All frames pass the tower; the projector takes clips."""
        return sum(super().visual_tokens(visual))

    def clip(self, image: GenericVisualInputs) -> GenericVisualInputs:
        frames = torch.cat([image.pixel_values] * 2)
        return GenericVisualInputs(
            pixel_values_videos=frames, video_grid_thw=image.image_grid_thw * torch.tensor([2, 1, 1])
        )

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """All patches of a clip see each other."""
        return int((towers.joined_grids(visual).prod(-1) ** 2).sum())
