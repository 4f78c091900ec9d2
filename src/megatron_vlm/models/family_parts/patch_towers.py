"""Families whose towers take patches and grids (Qwen's and GLM's) share this."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, vision_utils

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.family_parts import limits, llama, towers
from megatron_vlm.models.layers.fused import Rotary, inverse_frequencies, mrope_axes
from megatron_vlm.models.layers.tower_attention import use_segments
from megatron_vlm.models.positions import mrope_positions
from megatron_vlm.parallel.setup import on_device

VISUAL_KEYS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


class PatchVision(nn.Module):
    """A tower and its projector, called once for all images and videos of a micro batch.

    Patches (P, ...) and grids (N, 3), on the host -> features (M, D), or with deepstack (1 + n, M, D).
    """

    def forward(
        self,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,  # only positions need it
    ) -> Tensor:
        grids_N3 = join_media(image_grid_thw, video_grid_thw).cpu()
        return self.features(join_media(pixel_values, pixel_values_videos), grids_N3)

    def features(self, patches_PF: Tensor, grids_N3: Tensor) -> Tensor:
        raise NotImplementedError


class GridVision(PatchVision):
    """The HF visual module, projector included."""

    def __init__(self, visual: PreTrainedModel, deepstack: int):
        super().__init__()
        self.visual, self.deepstack = use_segments(visual), deepstack

    def features(self, patches_PF: Tensor, grids_N3: Tensor) -> Tensor:
        plan = self._plan(grids_N3, patches_PF.device)
        output = self.visual(patches_PF, grid_thw=grids_N3, **plan)
        if not self.deepstack:
            return output.pooler_output
        return torch.stack((output.pooler_output, *output.deepstack_features[: self.deepstack]))

    def _plan(self, grids_N3: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Indices and lengths that the tower derives from the grids, by the names of its arguments.

        Computed here on CPU; the tower itself would wait for the device, and for sequence lengths again in
        every layer. Sequence lengths stay on CPU, the rest goes to `device`.
        """
        visual = self.visual
        lengths = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_N3)}
        indices = {"position_ids": vision_utils.get_vision_position_ids(grids_N3, visual.spatial_merge_size)}
        if hasattr(visual, "window_size"):
            indices["window_index"], lengths["cu_window_seqlens"] = vision_utils.get_vision_window_index(
                grids_N3, visual.spatial_merge_size, visual.window_size, visual.patch_size
            )
        if hasattr(visual, "interpolation_mode"):
            interpolation = vision_utils.get_vision_interpolation_indices_and_weights(
                grids_N3,
                visual.num_grid_per_side,
                visual.interpolation_mode,
                visual.interpolation_align_corners,
                visual.spatial_merge_size,
            )
            indices["interp_indices"], indices["interp_weights"] = interpolation
        return lengths | {name: on_device(numbers, device) for name, numbers in indices.items()}


def join_media(images: Tensor | None, videos: Tensor | None) -> Tensor:
    return torch.cat([part for part in (images, videos) if part is not None])


def _squares(length_N: Tensor, run: int) -> Tensor:
    """The sum of the squares of the lengths when `length_N` is cut into runs; the last may be shorter."""
    return length_N // run * run**2 + (length_N % run) ** 2


@dataclass(frozen=True)
class MRope:
    """A family's M-RoPE, in chunks or `interleaved`; the family decides which, not the config.

    `sections` replaces a missing `mrope_section`; `part_of_head`: `partial_rotary_factor` is read.
    """

    sections: tuple[int, ...]
    interleaved: bool = False
    part_of_head: bool = False

    def rotary(self, text: Any) -> Rotary:
        """`text` is the text model's config."""
        rule = inverse_frequencies(text, part_of_head=self.part_of_head)
        axes = mrope_axes(self._sections(text.rope_parameters), self.interleaved, len(rule[0]))
        return Rotary([rule], axes)

    def limits(self) -> dict[str, limits.Limit]:
        """The limits of the keys of `rope_parameters`."""
        words = "three numbers" if self.interleaved else "numbers that add up to half the rotated channels"
        partial = limits.not_null("partial_rotary_factor") if self.part_of_head else {}
        return partial | {"mrope_section": limits.Limit(words, self._fits)}

    def _sections(self, rule: dict) -> list[int]:
        return rule.get("mrope_section", list(self.sections))

    def _fits(self, _: Any, rule_and_text: tuple[dict, Any]) -> bool:
        rule, text = rule_and_text
        sections = self._sections(rule)
        if not isinstance(sections, list) or not all(isinstance(n, int) and n >= 0 for n in sections):
            return False
        if self.interleaved:
            return len(sections) >= 3
        factor = rule.get("partial_rotary_factor", 1.0) if self.part_of_head else 1.0
        return 2 * sum(sections) == int(llama.head_dim(text) * factor)


class PatchFamily(llama.LlamaFamily, towers.GridFamily):
    """A family whose tower takes patches and grids, and whose positions are M-RoPE's."""

    visual_keys = VISUAL_KEYS
    top_limits = {"video_token_id": limits.VIDEO_TOKEN}
    vision_limits = {"head_dim": limits.only(None)}  # rotary embeddings alone read it
    vision_keys = {"visual.**": "model.visual.**"}
    groups = llama.LlamaFamily.groups | {
        "tower": ("vision.visual.patch_embed.", "vision.visual.pos_embed.", "vision.visual.blocks."),
        "projector": ("vision.visual.merger.",),
    }
    mrope: MRope
    # a moment of a video is so many steps of time; None: the prompt tells the time, see `mrope_positions`
    tokens_per_second: float | None = None

    @property
    def rope_limits(self) -> dict[str, limits.Limit]:
        return self.mrope.limits()

    def rotary(self) -> Rotary:
        return self.mrope.rotary(self.text)

    def position_ids(self, input_ids_T: Tensor, visual: GenericVisualInputs | None) -> Tensor:
        return mrope_positions(
            input_ids_T,
            visual,
            kinds=self.visual_kinds,
            merge_size=self.merge_size,
            tokens_per_second=self.tokens_per_second,
        )

    def vision_modules(self) -> GridVision:
        return GridVision(self.tower(), self.deepstack_features)

    def tower(self) -> PreTrainedModel:
        return towers.hf_tower(self.vision)

    @property
    def deepstack_features(self) -> int:
        """The number of tower layers whose features a layer of the language model takes.

        As in Transformers, indexes beyond the tower's depth give none, and features beyond the last layer of
        the language model are left out.
        """
        indexes = set(getattr(self.vision, "deepstack_visual_indexes", ()))
        return min(len(indexes & set(range(self.vision.depth))), self.text.num_hidden_layers)

    @property
    def merge_size(self) -> int:
        return self.vision.spatial_merge_size

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """In some layers of some towers, patches see each other in their window only."""
        vision = self.vision
        pairs = super().tower_pairs(visual)
        if not hasattr(vision, "fullatt_block_indexes"):
            return pairs
        side = vision.window_size // vision.patch_size // self.merge_size * self.merge_size
        frames_N, heights_N, widths_N = towers.joined_grids(visual).unbind(-1)
        # windows are all pairs of a run of rows and a run of columns, and so are the squares of their sizes
        windows = int((frames_N * _squares(heights_N, side) * _squares(widths_N, side)).sum())
        layers = len(set(vision.fullatt_block_indexes) & set(range(vision.depth)))
        return layers * pairs + (vision.depth - layers) * windows
