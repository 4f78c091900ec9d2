"""Floating-point operations of a model's parts, and of the batches of a step.

They balance the pipeline, and `plan` reports them. A multiplication and an addition count as two
operations. Training costs one forward pass, as much again for the gradients of activations after a trained
parameter, and as much again for gradients of trained parameters.

Model FLOPs of a step are the operations that its documents and images need, however they are computed: what
is computed again (recomputation), padding and blank images count nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from megatron_vlm.adapter_settings import with_peft_settings
from megatron_vlm.batch import IGNORE_INDEX, Batch, GenericVisualInputs
from megatron_vlm.config import RunConfig
from megatron_vlm.models.adapters.targets import find_targets, find_whole
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES, recomputed_layers
from megatron_vlm.models.layers.attention_kernels import most_workspace
from megatron_vlm.models.layers.attention_sizes import (
    DeltaHeads,
    feed_forward_width,
    heads_of,
    is_recurrent,
)
from megatron_vlm.models.layers.delta_net import sizes_of_head
from megatron_vlm.models.layers.delta_rule import CHUNK
from megatron_vlm.models.layers.tower_attention import use_sdpa
from megatron_vlm.models.stream import StreamLayout
from megatron_vlm.objectives import objective_of

DEFAULT_IMAGE = 1024 * 1024  # pixels, if the run does not say how large images may be


@dataclass(frozen=True)
class ImageCost:
    """One image: the number of its features, and the operations and kept bytes of a forward pass."""

    tokens: int
    items: int  # pieces that may be on different ranks: tiles, or the image as a whole
    pixel_bytes: int  # ready for the tower
    flops: float
    saved_bytes: float  # for the backward pass of what is trained
    saved_outside: float  # of these, by what is not recomputed: projector, patches, features
    layer_inputs: tuple[float, ...]  # bytes that each trained layer keeps when it is recomputed
    workspace: float  # bytes of attention's backward pass on a GPU, of one layer; 0 of a frozen tower
    passes: int  # the cost of the tower in a training step without recomputation, in forward passes

    def kept(self, recompute: bool) -> float:
        """Bytes kept after a forward pass."""
        if not recompute or not self.layer_inputs:
            return self.saved_bytes
        return sum(self.layer_inputs) + self.saved_outside

    def made_again(self, recompute: bool) -> float:
        """Bytes that a recomputed layer keeps while its backward pass runs."""
        if not recompute or not self.layer_inputs:
            return 0.0
        return (self.saved_bytes - self.saved_outside) / len(self.layer_inputs)


def layer_flops(architecture: dict, layer: int, seq_length: int) -> float:
    """Operations of a forward pass of one token through `layer`, in a document of `seq_length` tokens."""
    attention = attention_flops(architecture, layer, seq_length)
    return product_flops(architecture, layer) + attention + delta_rule_flops(architecture, layer)


def attention_flops(architecture: dict, layer: int, seq_length: int) -> float:
    """Return what of `layer_flops` is attention."""
    windows = architecture.get("layer_windows")
    pairs = pairs_seen(seq_length, windows[layer] if windows else None)
    return pair_flops(architecture, layer) * pairs / seq_length


def product_flops(architecture: dict, layer: int) -> float:
    """Operations of a forward pass of one token through `layer`, without attention and delta rule."""
    heads, width = heads_of(architecture, layer), architecture["hidden_size"]
    if is_recurrent(architecture, layer):
        delta_heads = architecture["delta_heads"]
        rows = delta_heads.keys * sum(sizes_of_head(delta_heads))
        linears = 2 * width * (rows + delta_heads.values * delta_heads.value_channels)
        return linears + _feed_forward_flops(architecture, layer)
    if latent := architecture.get("latent_heads"):
        linears = 2 * latent.weights(width, architecture["num_attention_heads"])
        return linears + _feed_forward_flops(architecture, layer)
    queries = architecture["num_attention_heads"] * heads.channels
    keys_and_values = heads.made * heads.channels
    gates = queries * architecture.get("attention_output_gate", False)
    projections = 2 * width * (2 * queries + gates + keys_and_values)
    of_inputs = 6 * width * architecture.get("layer_inputs", 0)  # to make it, its gate, and back
    return projections + of_inputs + _feed_forward_flops(architecture, layer)


def delta_rule_flops(architecture: dict, layer: int) -> float:
    """Operations of a token's convolution, and of the rule in chunks: three products with the state, and two
    each of keys and of values with pairs of a chunk's tokens (see `layers.delta_rule`)."""
    if not is_recurrent(architecture, layer):
        return 0.0
    heads: DeltaHeads = architecture["delta_heads"]
    keys, values = heads.keys * heads.key_channels, heads.values * heads.value_channels
    return 2 * heads.taps * heads.convolved + 6 * heads.state + 4 * CHUNK * (keys + values)


def pair_flops(architecture: dict, layer: int) -> float:
    """Operations of a layer's attention for a token and one that it sees: their score and the value."""
    heads = architecture["num_attention_heads"]
    if latent := architecture.get("latent_heads"):  # without the zeros that fill heads up to one width
        return 2 * heads * (latent.scores + latent.value)
    return 4 * heads * heads_of(architecture, layer).channels


def pairs_seen(length: int | np.ndarray, window: int | None) -> float | np.ndarray:
    """How many pairs of a token and one that it sees, itself included, a document of `length` tokens has."""
    window = length if window is None else np.minimum(window, length)
    return window * (window + 1) / 2 + (length - window) * window


def _feed_forward_flops(architecture: dict, layer: int) -> float:
    width = architecture["hidden_size"]
    if not architecture.get("moe_layer_freq", {layer: 0})[layer]:
        return 6 * width * feed_forward_width(architecture, layer)
    channels = architecture["moe_ffn_hidden_size"] * architecture["moe_router_topk"]
    channels += architecture.get("moe_shared_expert_intermediate_size", 0)
    chosen_by = architecture["num_moe_experts"] + architecture.get("moe_shared_expert_gate", False)
    return 6 * width * channels + 2 * width * chosen_by


def output_flops(architecture: dict) -> float:
    """Operations of a forward pass of one token through the output layer."""
    return 2 * architecture["hidden_size"] * architecture["vocab_size"]


def image_cost(config: RunConfig, description: Description) -> ImageCost:
    """The cost of an image of `data.max_pixels`: tower and projector run on shapes alone, without numbers."""
    image, vision, visual = tower_of_shapes(config, description, config.data.max_pixels or DEFAULT_IMAGE)
    passes = 3
    if "tower" in config.frozen:  # of a tower with adapters, they alone have gradients of weights
        passes = 2 if config.adapter.used and adapted(config, description, "tower") else 1
    # what is saved for the backward pass, inside and outside of the layers that recomputation runs again
    inside: list[torch.Tensor] = []
    outside: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    now = [outside]

    def enter(module: nn.Module, args: tuple) -> None:
        inputs.append(args[0])
        now.append(inside)

    def leave(*_: Any) -> None:
        now.pop()

    for module in vision.modules():
        if passes > 1 and isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: now[-1].append(t), lambda nothing: nothing),
        counted() as (operations, attention),
    ):
        vision(**visual.as_model_kwargs())
    weights = {p.untyped_storage()._cdata for p in vision.parameters()}
    tokens = description.visual_tokens(image)
    pixels = sum(t.nbytes for t in visual.as_model_kwargs().values() if t.is_floating_point())
    cost = ImageCost(
        tokens=sum(tokens),
        items=len(tokens),
        pixel_bytes=pixels,
        flops=sum(operations()),
        saved_bytes=sum(_storages(inside + outside, weights).values()),
        saved_outside=sum(_storages(outside, weights | _storages(inputs, set()).keys()).values()),
        layer_inputs=tuple(float(t.nbytes) for t in inputs),
        workspace=attention.workspace,
        passes=passes,
    )
    for tensors in (inside, outside, inputs):  # the graph holds the hook, which holds these, which hold it
        tensors.clear()
    return cost


@contextmanager
def counted() -> Iterator[tuple[Callable[[], tuple[int, int]], "AttentionOfShapes"]]:
    """Counts operations on shapes: gives a function for how many products have, and how many attention."""
    with (
        torch.device("cpu"),
        FlopCounterMode(display=False) as products,
        AttentionOfShapes() as attention,
    ):
        yield lambda: (products.get_total_flops(), attention.flops), attention


def adapted(config: RunConfig, description: Description, part: str) -> bool:
    """Whether a part of the model, a freeze group such as "tower", has adapters or modules trained whole."""
    adapter = with_peft_settings(config.adapter)
    weights = [target.weight for target in find_targets(adapter, description)]
    weights += find_whole(adapter, description)
    return any(weight.startswith(description.groups[part]) for weight in weights)


def _storages(tensors: list[torch.Tensor], excluded: set[int]) -> dict[int, int]:
    """Bytes by storage, without `others`."""
    storages = (t.untyped_storage() for t in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in excluded}


def tower_of_shapes(
    config: RunConfig, description: Description, pixels: int
) -> tuple[GenericVisualInputs, nn.Module, GenericVisualInputs]:
    """A blank image of about `pixels` on the host; tower and projector on the meta device, frozen as in the
    run, and the image. Attention is what `AttentionOfShapes` counts. A part with adapters counts as trained:
    it keeps the inputs of its linears as well."""
    dtype = DTYPES[config.model.dtype]
    with torch.device("cpu"):  # the host reads the grids, also while a model is built on the meta device
        image = GenericVisualInputs(**description.blank_image(pixels))
    with torch.device("meta"):
        vision = description.build_vision().to(dtype)
    use_sdpa(vision)
    frozen = tuple(
        prefix
        for group in config.frozen
        if not (config.adapter.used and adapted(config, description, group))
        for prefix in description.groups[group]
    )
    for name, parameter in vision.named_parameters(prefix="vision"):
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(frozen))
    return image, vision, image.map(lambda t: t.to(dtype) if t.is_floating_point() else t).to("meta")


class AttentionOfShapes(TorchFunctionMode):
    """Attention as devices run it, without storing its matrix; `flops` counts its operations, and `workspace`
    is what a backward pass holds besides in 16 bits.

    A backward pass has twice as many as the forward pass: scores that a kernel computes again do not count.
    """

    def __init__(self):
        super().__init__()
        self.flops = self.workspace = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        if query.requires_grad and query.dtype.itemsize == 2:
            shape = query.shape[0] * query.shape[2], query.shape[1], query.shape[3]
            workspace = most_workspace(shape, shape, query.shape[0], query.shape[2:3] * 2)
            self.workspace = max(self.workspace, workspace)
        return _AttentionShapes.apply(query, key, value, self)


class _AttentionShapes(torch.autograd.Function):
    """Saves what fused attention saves, and gives a result of its shape."""

    @staticmethod
    def forward(ctx, query, key, value, counter: AttentionOfShapes):
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        ctx.counter, ctx.flops = counter, 4 * query.numel() * key.shape[-2]
        counter.flops += ctx.flops
        return output

    @staticmethod
    def backward(ctx, gradient):
        ctx.counter.flops += 2 * ctx.flops
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def images_per_row(config: RunConfig, image: ImageCost) -> float:
    return config.data.visual_share * config.data.seq_length / image.tokens


def images_per_tower(config: RunConfig, image: ImageCost) -> float:
    """How many images of a row one rank's tower looks at: all, unless they are spread over tp · cp ranks."""
    images = images_per_row(config, image)
    if not config.parallel.images_spread:
        return images
    items = config.train.micro_batch_size * image.items
    ranks = config.parallel.tp * config.parallel.cp
    return max(images / ranks, min(images, 1 / items))  # an item stays whole


def language_model_passes(config: RunConfig) -> int:
    """The cost of a training step through a layer that is not recomputed, in forward passes."""
    return 2 + ("language_model" not in config.frozen) + reference_passes(config)


def reference_passes(config: RunConfig) -> int:
    """Forward passes by the starting weights, which some objectives compare with."""
    return objective_of(config).reference_passes


def vision_passes(config: RunConfig, image: ImageCost) -> int:
    """The cost of a training step through the tower; a projector hardly counts."""
    again = image.passes > 1 and config.model.recompute == "full"
    return image.passes + again + reference_passes(config)


def stage_costs(config: RunConfig, architecture: dict, image: ImageCost) -> tuple[int, float, float]:
    """(layers, the tower's work in layers, the output layer's work in layers) of a training step.

    `pipeline_layout` takes these. The tower's work is for a row of which `data.visual_share` are images.
    """
    layers, seq_length = architecture["num_layers"], config.data.seq_length
    one_layer = sum(layer_flops(architecture, i, seq_length) for i in range(layers)) / layers
    tokens = seq_length / (config.parallel.tp * config.parallel.cp)
    stages = config.parallel.pp * config.parallel.vpp
    again = len(recomputed_layers(config, range(-(-layers // stages)))) * stages / layers
    one_layer *= (language_model_passes(config) + min(again, 1)) * tokens
    tower = image.flops * images_per_tower(config, image) * vision_passes(config, image)
    output = output_flops(architecture) * tokens * language_model_passes(config)
    return layers, tower / one_layer, output / one_layer


class Work(NamedTuple):
    """The work of micro batches. `places` are tokens of rows with padding; a video counts as one image."""

    flops: float
    tokens: int
    places: int
    images: int


class StepWork:
    """Counts what micro batches ask of one model; everything is read on the host."""

    def __init__(self, config: RunConfig, description: Description):
        self._description = description
        architecture = description.architecture
        layers = range(architecture["num_layers"])
        # An adapter's own products are too few to count. The hidden states have gradients in any case:
        # embeddings or adapters are trained, or images come from what is.
        reference = reference_passes(config)
        passes = 2 + ("language_model" not in config.frozen) + reference
        self._per_token = passes * sum(product_flops(architecture, i) for i in layers)
        # no weights: gradients of all that goes in
        self._per_token += (3 + reference) * sum(delta_rule_flops(architecture, i) for i in layers)
        self._per_trained_token = passes * output_flops(architecture)
        windows = architecture.get("layer_windows") or [None] * len(layers)
        self._per_pair: Counter[int | None] = Counter()  # by window, over its layers
        for layer, window in enumerate(windows):
            self._per_pair[window] += (3 + reference) * pair_flops(architecture, layer)
        self._per_unit, self._per_feature, self._per_tower_pair = tower_flops(config, description)

    def of(self, batch: Batch) -> Work:
        """The work of a micro batch on the first pipeline stage, which has the images."""
        layout = StreamLayout(
            batch, self._description.visual_kinds, self._description.bidirectional_images, ranks=1
        )
        trained = int((batch["labels"] != IGNORE_INDEX).sum())
        flops = self._per_token * len(layout.real) + self._per_trained_token * trained
        flops += self._attention(layout)
        images = 0
        if batch["visual_inputs"] is not None:
            visual = GenericVisualInputs(**batch["visual_inputs"].normalized_for_model())
            tokens_N = self._description.visual_tokens(visual)
            images = len(tokens_N)
            flops += self._per_feature * sum(tokens_N) + self._per_unit * self._description.tower_units(
                visual
            )
            flops += self._per_tower_pair * self._description.tower_pairs(visual)
        return Work(float(flops), len(layout.real), batch["input_ids"].numel(), images)

    def _attention(self, layout: StreamLayout) -> float:
        """Over all layers, of pairs of a token and one that it sees, in an image block also a later one."""
        placement = layout.placement
        lengths = placement.ends - placement.starts
        blocks = [stop - start for _, start, stop in placement.blocks]
        later = sum(pairs_seen(length - 1, None) for length in blocks)

        def pairs(window: int | None) -> float:
            behind = sum(pairs_seen(placement.behind(length, window), None) for length in blocks)
            return pairs_seen(lengths, window).sum() + placement.has_blocks(window) * later + behind

        return sum(flops * pairs(window) for window, flops in self._per_pair.items())


def tower_flops(config: RunConfig, description: Description) -> tuple[float, float, float]:
    """Operations of tower and projector for each of `Description.tower_units`; of what works on features
    alone, for each of them; and of the tower's attention for a pair of patches. They come from passes of an
    image of shapes alone, with what the run freezes, and of the same image as a `Description.clip`."""
    image, vision, visual = tower_of_shapes(config, description, 0)

    def operations_of(visual: GenericVisualInputs) -> tuple[int, int]:
        with counted() as (operations, _):
            features = vision(**visual.as_model_kwargs())
            if features.requires_grad:
                features.sum().backward()
            for _ in range(reference_passes(config)):
                vision(**visual.as_model_kwargs())
        return operations()

    products, attention = operations_of(visual)
    units = description.tower_units(image)
    per_unit = products / units
    per_feature = 0.0
    if description.clip:
        more, _ = operations_of(description.clip(visual))
        per_unit = (more - products) / (description.tower_units(description.clip(image)) - units)
        per_feature = (products - per_unit * units) / sum(description.visual_tokens(image))
    return per_unit, per_feature, attention / max(1, description.tower_pairs(image))
