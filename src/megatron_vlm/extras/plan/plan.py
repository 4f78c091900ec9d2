"""Computes without a GPU what a run needs of its GPUs: parameters, memory and work.

Parameters are counted on modules built without numbers, in the run's own layout, so their number is exact.
Memory is an estimate: weights, gradients and optimizer state follow from the parameters, activations are what
layers save for their backward pass, and a fixed reserve covers temporary buffers and fragmentation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_vlm.config import RunConfig, derived
from megatron_vlm.config_rules.peft_config import settled
from megatron_vlm.config_rules.settings import validate
from megatron_vlm.extras.plan.memory import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    FIRST,
    LAST,
    Parameters,
    adapter_sizes,
    host_memory,
    saved_asides,
    saved_by_layer,
    saved_by_output_layer,
    saved_sizes,
    share,
)
from megatron_vlm.models.deepstack import extras_before
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import (
    DTYPES,
    LanguageModelConfig,
    has_experts,
    language_model_config,
    layer_spec,
)
from megatron_vlm.models.layers.attention_sizes import feed_forward_width, heads_of, is_recurrent
from megatron_vlm.models.layers.kernels.checks import attention_backends
from megatron_vlm.models.layers.layer_inputs import LayerInputs
from megatron_vlm.models.work import costs
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.layout import stage_layers

RESERVE = 4 * 2**30  # bytes for the CUDA context, communication buffers and fragmentation


@dataclass(frozen=True)
class Stage:
    """The bytes that each rank of one pipeline stage holds, and its operations for one micro batch."""

    layers: tuple[range, ...]  # one range for each virtual stage
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    flops: float
    host: dict[str, float]  # bytes of the host's memory, by what they are for

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + RESERVE


@dataclass(frozen=True)
class MemoryPlan:
    config: RunConfig
    description: Description
    gpus: int
    stages: tuple[Stage, ...]
    image: costs.ImageCost
    images_per_row: float
    language_model_flops: float  # per token of a row, forward and backward
    tower_flops: float  # likewise
    useful_flops: float  # of a step, on all GPUs, without what is recomputed

    @property
    def fullest(self) -> int:
        """The stage whose ranks need the most memory."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].memory)

    @property
    def fullest_host(self) -> int:
        """The stage whose ranks need the most memory of their hosts."""
        return max(range(len(self.stages)), key=lambda i: sum(self.stages[i].host.values()))

    @property
    def memory(self) -> float:
        return self.stages[self.fullest].memory

    @property
    def imbalance(self) -> float:
        """The work of the busiest stage, divided by the mean."""
        work = [stage.flops for stage in self.stages]
        return max(work) * len(work) / sum(work)

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, if all stages were equal (arXiv 2104.04473)."""
        waiting = (self.config.parallel.pp - 1) / self.config.parallel.vpp
        return waiting / (waiting + derived(self.config, self.gpus)["micro_batches_per_step"])


@dataclass
class KnownCosts:
    """Costs that plans of one model and one size of images share, so that they are computed once."""

    image: costs.ImageCost | None = None
    pieces: dict[tuple[int, int], _Pieces] = field(default_factory=dict)  # by tp and ep


def make_plan(
    config: RunConfig, description: Description, gpus: int, known: KnownCosts | None = None
) -> MemoryPlan:
    """The plan of a valid configuration on `gpus` GPUs. Plans that share `known` are made faster.

    Raises ConfigError or ValueError that says what to change if the layout does not divide GPUs or model.
    """
    validate(config, gpus)
    architecture = description.architecture
    known = known or KnownCosts()
    image = known.image = known.image or costs.image_cost(config, description)
    loaded = replace(config, model=replace(config.model, load_weights=True))  # nothing is drawn at random
    stage_costs = costs.stage_costs(config, architecture, image)
    megatron_config = language_model_config(loaded, architecture, stage_costs)
    meta = torch.device("meta")
    megatron_config.attention_backends = attention_backends(megatron_config, config.model, meta)
    split = config.parallel.tp, config.parallel.ep
    if split not in known.pieces:
        with setup.pretended(config.parallel, gpus), meta:
            known.pieces[split] = _Pieces(config, megatron_config, description)
    pieces = known.pieces[split]
    stages = tuple(
        _stage(config, megatron_config, architecture, pieces, image, gpus, i)
        for i in range(config.parallel.pp)
    )
    passes = costs.language_model_passes(config)
    per_row = costs.images_per_row(config, image)
    again = config.model.recompute == "full"
    layers = sum(
        costs.layer_flops(architecture, i, config.data.seq_length) for i in range(megatron_config.num_layers)
    )
    language_model = passes * layers + costs.output_passes(config) * costs.output_flops(architecture)
    an_image = image.flops * per_row / config.data.seq_length
    tower = costs.vision_passes(config, image)
    of_tower = again and image.passes > 1
    useful = language_model - again * layers + (tower - of_tower) * an_image
    return MemoryPlan(
        config=config,
        description=description,
        gpus=gpus,
        stages=stages,
        image=image,
        images_per_row=per_row,
        language_model_flops=language_model,
        tower_flops=tower * an_image,
        useful_flops=useful * config.train.global_batch_size * config.data.seq_length,
    )


class _Pieces:
    """Parameters of the model's pieces on one rank, from modules built on the meta device."""

    def __init__(self, config: RunConfig, megatron_config: LanguageModelConfig, description: Description):
        self._trained = trained = "language_model" not in config.frozen
        self._config = megatron_config
        spec = megatron_config.own_layer_spec or layer_spec
        examples = {self._kind(i): i for i in range(megatron_config.num_layers)}
        self._layers = {
            kind: _count(
                build_module(
                    spec(megatron_config, i), config=megatron_config, layer_number=i + 1, vp_stage=0
                ),
                trained,
            )
            for kind, i in examples.items()
        }
        width = megatron_config.hidden_size
        embedding = megatron_config.padded_vocabulary // megatron_config.tensor_model_parallel_size * width
        self._vocabulary = Counter(dense=embedding, trained_dense=embedding * trained)
        self._layer_inputs = Counter()
        if megatron_config.layer_inputs:
            self._layer_inputs = _count(LayerInputs(megatron_config), trained)
        self._norm = Counter(dense=width, trained_dense=width * trained)
        self._adapters = adapter_sizes(config, description)
        self._saved = saved_sizes(config, description)
        self._drops = settled(config.adapter).lora_dropout > 0
        self.vision = _count_vision(description, config.frozen)
        self.vision += self._adapters_of(None)

    def _kind(self, layer: int) -> tuple:
        """Layers of one kind have equally many parameters."""
        recurrent = is_recurrent(self._config, layer)
        sizes = heads_of(self._config, layer), feed_forward_width(self._config, layer)
        return has_experts(self._config, layer), *sizes, recurrent

    def _adapters_of(self, layer: int | None) -> Parameters:
        """Adapters, and that what is trained whole beside them, which is counted elsewhere, is trained."""
        dense = sum(self._adapters[layer, part] for part in (ATTENTION, FEED_FORWARD, None))
        experts = self._adapters[layer, EXPERTS]
        trained = dense + self._saved[layer]
        return Counter(dense=dense, experts=experts, trained_dense=trained, trained_experts=experts)

    def stage(self, layers: tuple[range, ...], first: bool, last: bool) -> Parameters:
        """The parameters of the stage that holds these layers."""
        pieces = [self._layers[self._kind(i)] + self._adapters_of(i) for i in chain.from_iterable(layers)]
        if first:
            pieces += [self._vocabulary, self._layer_inputs, self.vision, self._adapters_of(FIRST)]
        if last:
            pieces += [self._norm, self._adapters_of(LAST)]
        one_chunk = first and last and len(layers) == 1
        if last and not (one_chunk and self._config.tie_embeddings):
            pieces.append(self._vocabulary)
        return sum(pieces, Counter())

    def saved(self, megatron_config: LanguageModelConfig, layer: int, value: int) -> float:
        """Bytes per token that a layer saves; its linears' inputs, where these or adapters are trained."""
        adapters = self._adapters
        attention = self._trained or adapters[layer, ATTENTION] + self._saved[layer] > 0
        inner = adapters[layer, FEED_FORWARD] + adapters[layer, EXPERTS]
        feed_forward = self._trained or inner + self._saved[layer] > 0
        return saved_by_layer(megatron_config, layer, value, attention, feed_forward, self._drops)


def _count(module: torch.nn.Module, trained: bool) -> Parameters:
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for p in module.parameters()) - experts
    return Counter(
        dense=dense, experts=experts, trained_dense=dense * trained, trained_experts=experts * trained
    )


def _count_vision(description: Description, frozen: list[str]) -> Parameters:
    prefixes = tuple(prefix for group in frozen for prefix in description.groups[group])
    sizes = {f"vision.{n}": p.numel() for n, p in description.build_vision().named_parameters()}
    trained = sum(size for name, size in sizes.items() if not name.startswith(prefixes))
    return Counter(dense=sum(sizes.values()), trained_dense=trained)


def _stage(
    config: RunConfig,
    megatron_config: LanguageModelConfig,
    architecture: dict,
    pieces: _Pieces,
    image: costs.ImageCost,
    gpus: int,
    number: int,
) -> Stage:
    parallel = config.parallel
    first = number == 0
    last = number == config.parallel.pp - 1
    layers = tuple(stage_layers(megatron_config, number, v) for v in range(parallel.vpp))
    parameters = pieces.stage(layers, first, last)
    value = DTYPES[config.model.dtype].itemsize
    gradient = 4 if config.optimizer.reduce_in_fp32 else value
    tokens = config.train.micro_batch_size * config.data.seq_length
    images = config.train.micro_batch_size * costs.images_per_tower(config, image)
    lm_passes = costs.language_model_passes(config)
    seq_length = config.data.seq_length
    numbers = chain.from_iterable(layers)
    layers_flops = sum(costs.layer_flops(architecture, i, seq_length) for i in numbers)
    activations = _activations(config, megatron_config, pieces, layers, image, gpus, number)
    if first and parallel.tp > 1:  # the tower's gradients, joined, when their mean over the ranks is taken
        activations = max(activations, 4 * pieces.vision["trained_dense"])
    flops = lm_passes * layers_flops + last * costs.output_passes(config) * costs.output_flops(architecture)
    total = parameters["dense"] + parameters["experts"]
    trained = parameters["trained_dense"] + parameters["trained_experts"]
    updated = share(parameters, "trained_", parallel, gpus) if parallel.distributed_optimizer else trained
    if gradient < 4:  # Adam takes them in fp32, when activations are gone
        activations = max(activations, 4 * updated)
    state = updated * (12 if value == 2 else 8)
    return Stage(
        layers=layers,
        parameters=total,
        weights=value * (total + costs.reference_passes(config) * trained),
        gradients=gradient * trained,
        optimizer=0 if config.optimizer.offload else state,
        activations=activations,
        flops=flops * tokens / (parallel.tp * parallel.cp)
        + first * costs.vision_passes(config, image) * images * image.flops,
        host=host_memory(config, parameters, image, gpus, first)
        | ({"what Adam keeps": state} if config.optimizer.offload else {}),
    )


def _activations(
    config: RunConfig,
    megatron_config: LanguageModelConfig,
    pieces: _Pieces,
    layers: tuple[range, ...],
    image: costs.ImageCost,
    gpus: int,
    stage: int,
) -> float:
    """The most bytes that the stage's ranks keep at any time: what forward passes keep for the backward, and
    what the backward needs besides for the output layer or for a recomputed layer, whichever is more. When a
    tower's layer is recomputed, the language model's layers of that micro batch are done."""
    rows = config.train.micro_batch_size
    tp = config.parallel.tp
    cp = config.parallel.cp
    tokens = rows * config.data.seq_length / cp
    recompute = config.model.recompute == "full"
    value = DTYPES[config.model.dtype].itemsize
    trained = "language_model" not in config.frozen
    cut = tp if megatron_config.sequence_parallel else 1
    hidden = tokens * value * megatron_config.hidden_size
    numbers = [i for each in layers for i in each]
    per_layer = [tokens * pieces.saved(megatron_config, i, value) for i in numbers]
    saved = sum(per_layer)
    if recompute:  # the layers' inputs; the first ones bring visual features for later layers
        extras = sum(extras_before(megatron_config, i + 1) for i in numbers)
        saved = hidden / cut * (len(per_layer) + extras)
        saved += tokens * sum(saved_asides(megatron_config, i, value) for i in numbers)
    forwards = forwards_kept(config, derived(config, gpus)["micro_batches_per_step"], stage)
    masks = len(set(megatron_config.layer_windows)) or 1 if config.model.attention == "dense" else 0
    of_one = saved + value * masks * tokens * rows * config.data.seq_length
    saved = forwards * of_one
    images = rows * costs.images_per_tower(config, image)
    if stage == 0:
        saved += images * forwards * image.kept(recompute)
        saved += rows * costs.images_per_row(config, image) * image.pixel_bytes  # on all ranks
    # a layer's input from all tensor-parallel ranks, and the gradient that goes back to them
    besides = 2 * hidden if megatron_config.sequence_parallel else 0.0
    if recompute:
        besides += max(per_layer)
        if any(has_experts(megatron_config, i) for i in numbers):  # gradients on their way
            besides += (2 + trained) * hidden / cut * megatron_config.moe_router_topk
    if stage == config.parallel.pp - 1:
        besides = max(besides, saved_by_output_layer(config, megatron_config, tokens, trained))
    if stage == 0:
        besides = max(besides, images * image.made_again(recompute) - of_one)
    return saved + besides


def forwards_kept(config: RunConfig, micro_batches: int, stage: int) -> float:
    """How many micro batches' activations a stage keeps at a time in Megatron's 1F1B schedules."""
    pp = config.parallel.pp
    vpp = config.parallel.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp
