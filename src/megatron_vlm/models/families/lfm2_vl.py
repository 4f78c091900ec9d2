"""LFM2-VL's shell around any text model: SigLIP2's NaFlex tower, in native resolution, and a projector.

LFM2's own text model is refused, see `supported`. What is trained here is composed of SigLIP2 and Llama,
Mistral, Qwen2 or Qwen3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlMultiModalProjector

from megatron_vlm.models.family_parts import limits, llama, texts, towers
from megatron_vlm.models.layers.tower_attention import use_segments, uses_segments
from megatron_vlm.parallel.setup import on_device


class Siglip2Vision(nn.Module):
    """The HF tower and projector; all images run as one sequence in which each image sees only itself.

    pixel_values (P, F), without padding, and image_grid_thw (N, 3), on the host -> features (M, D).
    """

    def __init__(self, hf_config: Any):
        super().__init__()
        self.vision_tower = use_segments(towers.hf_tower(hf_config.vision_config))
        self.multi_modal_projector = Lfm2VlMultiModalProjector(hf_config)
        self.factor = hf_config.downsample_factor

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        shapes_N = [(rows, columns) for _, rows, columns in image_grid_thw.tolist()]
        project = self.vision_tower.embeddings.patch_embedding
        hidden_PE = project(pixel_values.to(project.weight.dtype)) + self._positions(shapes_N)
        hidden_PE = self.vision_tower.post_layernorm(self._encoded(hidden_PE, image_grid_thw.prod(-1)))
        order_P = on_device(towers.merge_order(shapes_N, self.factor), hidden_PE.device)
        # one image of factor x factor patches for each feature
        merged = hidden_PE.index_select(0, order_P).unflatten(0, (-1, self.factor, self.factor))
        return self.multi_modal_projector(merged).flatten(0, 2)

    def _positions(self, shapes_N: list[tuple[int, int]]) -> Tensor:
        """Return the position embeddings (P, E), resized for each shape as Transformers resizes them.

        Its own function computes the weights on the host, too, but then waits for their copy.
        """
        embeddings = self.vision_tower.embeddings
        side, table = embeddings.position_embedding_size, embeddings.position_embedding.weight
        weights = {shape: resize_weights(side, *shape) for shape in dict.fromkeys(shapes_N)}
        weights_Pp = on_device(torch.cat([weights[shape] for shape in shapes_N]), table.device)
        return (weights_Pp @ table.float()).to(table.dtype)

    def _encoded(self, hidden_PE: Tensor, patches_N: Tensor) -> Tensor:
        """The output of the tower's layers, in which each image sees only itself."""
        encoder = self.vision_tower.encoder
        if not uses_segments(self.vision_tower):
            images = hidden_PE.split(patches_N.tolist())
            return torch.cat([encoder(image[None]).last_hidden_state[0] for image in images])
        # its layers hand on a mask and nothing else
        return encoder(hidden_PE[None], pad(patches_N.cumsum(0), (1, 0))).last_hidden_state[0]


def resize_weights(side: int, rows: int, columns: int) -> Tensor:
    """Return the weights (rows * columns, side * side) that resize a square table to an image's shape.

    As in `torch.nn.functional.interpolate(mode="bilinear", antialias=True)`, weights are triangles around
    each patch's center, along rows and along columns.
    """

    def along(patches: int) -> Tensor:
        scale = side / torch.tensor(float(patches))
        centers = (torch.arange(patches, dtype=torch.float32)[:, None] + 0.5) * scale - 0.5
        distances = (torch.arange(side, dtype=torch.float32) - centers).abs()
        weights = (1 - distances / scale.clamp(min=1)).clamp(min=0)
        return weights / weights.sum(-1, keepdim=True)

    return (along(rows)[:, None, :, None] * along(columns)[None, :, None, :]).flatten(2).flatten(0, 1)


class Lfm2VL(texts.HoldsTexts, towers.GridFamily):
    model_type = "lfm2_vl"
    top_limits = {"projector_hidden_size": limits.SIZE}
    # its weights would be in the checkpoint and have no effect
    vision_limits = {"vision_use_head": limits.only(False)}
    vision_keys = {name: f"model.{name}" for name in llama.SideBySide.vision_keys}
    renames = ((r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),)

    def vision_modules(self) -> nn.Module:
        return Siglip2Vision(self.hf_config)

    @property
    def merge_size(self) -> int:
        return self.hf_config.downsample_factor
