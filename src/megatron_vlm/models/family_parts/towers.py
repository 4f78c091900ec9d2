"""Towers of Transformers as several families hold them, for images of one size and in patches."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModel, PreTrainedModel

from megatron_vlm.batch import GenericVisualInputs, is_raw
from megatron_vlm.models.description import Description
from megatron_vlm.models.family_parts import limits
from megatron_vlm.models.weights.rules import Operation, Rule

# names in the code of modules that `fused_towers` may know
FUSED = {"variance_epsilon", "gate_proj", "sigmoid", "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"}


def layers_exist(layers: Any, hf_config: Any) -> bool:
    """Whether the tower has these hidden states, one or several: what goes into its layers, and what comes
    out of the last. Transformers takes a bare 0 for "no states"."""
    if layers == 0:
        return False
    count = hf_config.vision_config.num_hidden_layers + 1
    layers = [layers] if isinstance(layers, int) else layers
    return len(layers) > 0 and all(-count <= layer < count for layer in layers)


FEATURE_LAYERS = limits.Limit("layers of the tower; what goes into the first is [0]", layers_exist)


class GridFamily(Description):
    """A family whose tower takes the patches of images in their own size, and their grids."""

    visual_keys: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    @property
    @abstractmethod
    def merge_size(self) -> int:
        """The patches along each side of a feature."""

    @property
    def patch_size(self) -> int:
        """The pixels along each side of a patch."""
        return self.vision.patch_size

    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        side = self.merge_size * max(1, round(pixels**0.5 / (self.patch_size * self.merge_size)))
        width = 3 * getattr(self.vision, "temporal_patch_size", 1) * self.patch_size**2
        return {
            "pixel_values": torch.zeros(side**2, width),
            # the host reads it, also while a model is built on the meta device
            "image_grid_thw": torch.tensor([[1, side, side]], device="cpu"),
        }

    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of merged patches of each item."""
        width = 3 * self.patch_size**2  # of a patch of one moment, as raw ones are
        widths = (width, width * getattr(self.vision, "temporal_patch_size", 1))
        for pixels in (visual.pixel_values, visual.pixel_values_videos):
            if pixels is not None and pixels.shape[-1] not in widths:
                raise ValueError(f"patches of {pixels.shape[-1]} numbers, and the tower takes {widths[-1]}")
        return (joined_grids(visual).prod(-1) // self.merge_size**2).tolist()

    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """Patches see each other in an image or a moment of a video."""
        frames_N, heights_N, widths_N = joined_grids(visual).unbind(-1)
        return int((frames_N * (heights_N * widths_N) ** 2).sum())


def joined_grids(visual: GenericVisualInputs) -> Tensor:
    """(N, 3): the grids of images, then of videos."""
    grids = (visual.image_grid_thw, visual.video_grid_thw)
    return torch.cat([grid for grid in grids if grid is not None]).cpu()


def fused_qkv(attention: str, fused: str, q: Operation, k: Operation, v: Operation) -> list[Rule]:
    """The rules of a tower's queries, keys and values; the HF tensors `fused` hold all three."""
    return [
        Rule(
            f"vision.{attention}.{of}_proj.{kind}",
            (f"model.{attention}.{fused}.{kind}",),
            operation,
            rows=3,
            block=row,
        )
        for kind in ("weight", "bias")
        for row, (of, operation) in enumerate({"q": q, "k": k, "v": v}.items())
    ]


def hf_tower(vision: Any, **options: Any) -> PreTrainedModel:
    """Transformers' tower for a copy of this config, with "sdpa" as its attention."""
    tower = AutoModel.from_config(
        deepcopy(vision), attn_implementation="sdpa", trust_remote_code=False, **options
    )
    return with_fused_functions(with_patches_by_linears(tower))


def tower_of_class(tower_class: type[PreTrainedModel], vision: Any) -> PreTrainedModel:
    """`hf_tower` for a class that `AutoModel` does not know, or not in every Transformers."""
    tower = tower_class._from_config(deepcopy(vision), attn_implementation="sdpa")
    return with_fused_functions(with_patches_by_linears(tower))


def with_patches_by_linears(tower: PreTrainedModel) -> PreTrainedModel:
    """The tower, whose convolutions that cut images into patches run as linears, with the same weights: some
    GPUs take 10 to 1000 times as long for one in bf16 and three dimensions (pytorch #174051). On a CPU they
    stay, and round as in Transformers; a linear there is two to three times as near to fp64."""
    for module in tower.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.kernel_size == module.stride:
            module.forward = partial(_patches, module, module.forward)
    return tower


def with_fused_functions(tower: PreTrainedModel) -> PreTrainedModel:
    """The tower, in which modules whose code `fused_towers` knows call its functions."""
    if any(FUSED.intersection(type(module).forward.__code__.co_names) for module in tower.modules()):
        # only where it serves, as it imports Llama
        from megatron_vlm.models.layers.fused_towers import fuse_pointwise

        fuse_pointwise(tower)
    return tower


def _patches(convolution: nn.Module, forward: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    return forward(pixels) if pixels.device.type == "cpu" else _linear_of_patches(convolution, pixels)


def _linear_of_patches(convolution: nn.Conv2d | nn.Conv3d, pixels: Tensor) -> Tensor:
    """(N, C, ...) → (N, E, ...): what the convolution gives, whose stride is its kernel, without padding."""
    for axis, size in enumerate(convolution.kernel_size, 2):
        pixels = pixels.unfold(axis, size, size)  # a view; the channels inside of a patch come last
    last = len(convolution.kernel_size) + 1
    patches = pixels.movedim(1, last).flatten(last)
    return linear(patches, convolution.weight.flatten(1), convolution.bias).movedim(-1, 1)


def chosen_states(tower: PreTrainedModel, pixels: Tensor, layers: int | list[int], **sizes: Any) -> Tensor:
    """The hidden states (N, P, E) of a layer, or of several side by side."""
    return chosen(tower(pixels, output_hidden_states=True, **sizes).hidden_states, layers)


def chosen(states: Sequence[Tensor], layers: int | list[int]) -> Tensor:
    """The states of a layer, or of several side by side."""
    layers = [layers] if isinstance(layers, int) else layers
    return torch.cat([states[layer] for layer in layers], dim=-1)


def refuse_other_sizes(pixels: Tensor, vision: Any, exactly: bool = False) -> None:
    """Raises ValueError unless images, tiles or frames fit the tower: squares of its number of patches, or of
    its size exactly. `vision` is its config."""
    sizes = vision.image_size, 1 if exactly else vision.patch_size
    side, patch = (size if isinstance(size, int) else size[0] for size in sizes)
    height, width = pixels.shape[1:3] if is_raw(pixels) else pixels.shape[2:]
    if {height // patch, width // patch} != {side // patch}:
        raise ValueError(f"images of {width} x {height} pixels, and the tower takes {side} x {side}")


def merge_order(shapes_N: list[tuple[int, int]], factor: int) -> Tensor:
    """(P,): an order of patches, from rows of these shapes, in which a feature's follow one another."""
    orders, start = [], 0
    for rows, columns in shapes_N:
        numbers = torch.arange(start, start + rows * columns)
        squares = numbers.view(rows // factor, factor, columns // factor, factor).transpose(1, 2)
        orders.append(squares.flatten())
        start += rows * columns
    return torch.cat(orders)
