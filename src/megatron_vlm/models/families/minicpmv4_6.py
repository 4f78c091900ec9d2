"""MiniCPM-V 4.6: Qwen3.5's text model, and a SigLIP-like tower that merges windows of patches on the way.

An image is a whole and slices, each with its own number of patches; each is an item, and so are a frame's.
"""

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6Merger, MiniCPMV4_6VisionModel
from transformers.vision_utils import get_vision_nearest_position_ids

from megatron_vlm.batch import GenericVisualInputs, count_up
from megatron_vlm.models.families import qwen3_5
from megatron_vlm.models.family_parts import limits, llama, patch_towers, towers
from megatron_vlm.models.layers.fused import Rotary, inverse_frequencies
from megatron_vlm.models.layers.tower_attention import use_segments
from megatron_vlm.parallel.setup import on_device

SIDE = 2  # patches along the side of a square, both of a window and of a feature
SQUARE = limits.only([SIDE, SIDE], (SIDE, SIDE))


class SlicedVision(patch_towers.PatchVision):
    """The HF tower and projector, for pieces of images and for frames."""

    def __init__(self, tower: PreTrainedModel, merger: nn.Module, windows_after: int | None):
        super().__init__()
        self.vision_tower = use_segments(tower)
        self.merger = merger
        self.windows_after = windows_after  # the layer, if any

    def features(self, patches_PF: Tensor, grids_N3: Tensor) -> Tensor:
        sizes_N2 = grids_N3[:, 1:]
        tower = self.vision_tower
        hidden_1PE = self._embedded(patches_PF, sizes_N2)[None]
        bounds = pad(sizes_N2.prod(-1).cumsum(0), (1, 0))
        for number, layer in enumerate(tower.encoder.layers):
            longest = int(bounds.diff().max())
            hidden_1PE = layer(hidden_1PE, attention_mask=None, cu_seqlens=bounds, max_seqlen=longest)
            if number == self.windows_after:
                hidden_1PE = self._merged(tower.vit_merger, hidden_1PE, sizes_N2)
                sizes_N2 = sizes_N2 // SIDE
                bounds = bounds // SIDE**2
        hidden_PE = tower.post_layernorm(hidden_1PE)[0]
        (project,) = self.merger.mlp
        return project(_in_squares(hidden_PE, sizes_N2).flatten(1))

    def _embedded(self, patches_PF: Tensor, sizes_N2: Tensor) -> Tensor:
        embed = self.vision_tower.embeddings
        pixels = patches_PF.to(embed.patch_embedding.weight.dtype)
        side = embed.patch_size
        patches_PE = embed.patch_embedding(pixels.unflatten(-1, (-1, side, side))).flatten(1)
        places_P = get_vision_nearest_position_ids(sizes_N2, embed.num_patches_per_side)
        return patches_PE + embed.position_embedding(on_device(places_P, patches_PF.device))

    def _merged(self, merger: nn.Module, hidden_1PE: Tensor, sizes_N2: Tensor) -> Tensor:
        """(1, P / 4, E): each window, whose patches see only each other, made one."""
        windows_W4E = _in_squares(hidden_1PE[0], sizes_N2)
        attention = merger.self_attn
        normed = merger.layer_norm1(windows_W4E)
        q, k, v = (
            project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        # by its module: a rehearsal has another one there, which is one kernel
        seen = functional.scaled_dot_product_attention(q, k, v, scale=attention.scaling)
        windows_W4E = windows_W4E + attention.out_proj(seen.transpose(1, 2).flatten(2))
        merged = merger.act(merger.linear_1(merger.pre_norm(windows_W4E.flatten(1))))
        return (merger.linear_2(merged) + windows_W4E.mean(1))[None]


def _in_squares(hidden_PE: Tensor, sizes_N2: Tensor) -> Tensor:
    order_P = on_device(towers.merge_order(sizes_N2.tolist(), SIDE), hidden_PE.device)
    return hidden_PE.index_select(0, order_P).unflatten(0, (-1, SIDE**2))


class MiniCPMV46(qwen3_5.Qwen35):
    model_type = "minicpmv4_6"
    box_format = None  # Qwen3.5's is another model's way
    top_limits = qwen3_5.Qwen35.top_limits | {
        "insert_layer_id": limits.Limit(
            "a layer of the tower", lambda layer, top: 0 <= layer < top.vision_config.num_hidden_layers
        ),
        "downsample_mode": limits.only("16x", "4x"),
        "merge_kernel_size": SQUARE,
        "merger_times": limits.only(1),  # as the processor counts tokens
        **dict.fromkeys(("image_size", "drop_vision_last_layer", "patch_size"), limits.UNUSED),
    }
    # of insert_layer_id, Transformers takes the whole model's
    vision_limits = {"window_kernel_size": SQUARE, "insert_layer_id": limits.UNUSED}
    uses_part = True
    parts: tuple[type, type] = (MiniCPMV4_6VisionModel, MiniCPMV4_6Merger)
    vision_keys = {"vision_tower.**": "model.vision_tower.**", "merger.**": "model.merger.**"}
    groups = llama.LlamaFamily.groups | {"projector": ("vision.merger.",)}

    def rotary(self) -> Rotary:
        return Rotary([inverse_frequencies(self.text, part_of_head=True)])

    def position_ids(self, input_ids_T: Tensor, visual: GenericVisualInputs | None) -> Tensor:
        return count_up(input_ids_T, visual)

    @property
    def merge_size(self) -> int:
        return SIDE**2 if self.hf_config.downsample_mode == "16x" else SIDE

    def vision_modules(self) -> nn.Module:
        tower, merger = self.parts
        hf_config = self.hf_config
        return SlicedVision(
            towers.tower_of_class(tower, self.vision),
            merger(hf_config),
            windows_after=hf_config.insert_layer_id if hf_config.downsample_mode == "16x" else None,
        )

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each piece."""
        sizes = towers.joined_grids(visual)[:, 1:]
        if (sizes % self.merge_size).any():
            raise ValueError(
                f"pieces of {sizes.tolist()} patches, and features are of {self.merge_size} a side"
            )
        return super().visual_tokens(visual)

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """Behind the windows there are a quarter of the patches."""
        patches_N = towers.joined_grids(visual).prod(-1)
        layers = self.vision.num_hidden_layers
        pairs = int((patches_N**2).sum())
        if self.merge_size == SIDE:
            return layers * pairs
        full_layers = self.hf_config.insert_layer_id + 1
        window = SIDE**2
        return (
            full_layers * pairs + window * int(patches_N.sum()) + (layers - full_layers) * pairs // window**2
        )
