"""Computes without a GPU what each rank of a run holds and does: parameters and memory by pipeline stage.

Parameters are exact. Memory is an estimate: weights, gradients and optimizer state follow from the
parameters, activations from what layers keep on shapes and from the schedule of the pipeline. A fixed reserve
covers temporary buffers and fragmentation. `rehearsal` runs the step itself.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vlm.config import RunConfig, derived, fewest_processes
from megatron_vlm.extras.plan.rehearsal import (
    META,
    as_on_a_gpu,
    example_batch,
    model_on_shapes,
    on_shapes,
    rehearse,
)
from megatron_vlm.messages import aligned
from megatron_vlm.models import costs
from megatron_vlm.models.description import Description
from megatron_vlm.models.head import CHUNK_BYTES, output_losses
from megatron_vlm.models.language_model import (
    DTYPES,
    LanguageModelConfig,
    extras_before,
    has_experts,
    language_model_config,
    recomputed_layers,
)
from megatron_vlm.models.layers.attention_kernels import most_workspace
from megatron_vlm.models.layers.attention_sizes import heads_of, is_recurrent
from megatron_vlm.models.layers.fused import cheap_outputs
from megatron_vlm.models.vlm import VLMModel, streams_of
from megatron_vlm.parallel.layout import stage_layers
from megatron_vlm.validate import validate

# Numbers of one rank: "dense" and "experts", apart as other ranks hold the experts' optimizer state, and
# "trained_dense" and "trained_experts" of them
Parameters = Counter[str]
LAYERS = "language_model.decoder.layers."
PARTS = ("weights", "gradients", "optimizer", "activations")  # of a rank's memory
RESERVE = 4 * 2**30  # bytes for the CUDA context, communication buffers and fragmentation


@dataclass(frozen=True)
class Pieces:
    """The pieces of a model on one rank of a layout without pipeline stages."""

    layers: list[Parameters]
    saved: list[float]  # bytes that each layer keeps of a micro batch for its backward pass
    cheap: list[float]  # of these, outputs of norms and gates
    vision: Parameters  # tower and projector
    inputs: Parameters  # besides these, of the first stage: the embedding
    outputs: Parameters  # of the last stage: the last norm, and an output layer of its own
    tied_outputs: Parameters  # of the last stage besides, if it is not the first: the embedding once more


@dataclass(frozen=True)
class Stage:
    """The bytes that each rank of one pipeline stage holds, and its operations for one micro batch."""

    layers: tuple[range, ...]  # one range for each virtual stage
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    offloaded: float  # what Adam keeps in the host's memory instead
    activations: float
    flops: float
    attention_flops: float  # of these, the language model's attention

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

    @property
    def fullest(self) -> int:
        """The stage whose ranks need the most memory."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].memory)

    @property
    def memory(self) -> float:
        return self.stages[self.fullest].memory

    @property
    def representatives(self) -> list[int]:
        """The first ranks of the stages that differ: the first, the last, and the fullest."""
        pp = self.config.parallel.pp
        return [stage * self.gpus // pp for stage in sorted({0, pp - 1, self.fullest})]


@dataclass
class KnownCosts:
    """Costs that plans of one model and one size of images share, so that they are measured once."""

    image: costs.ImageCost | None = None
    pieces: dict[tuple, Pieces] = field(default_factory=dict)


def make_plan(
    config: RunConfig, description: Description, gpus: int, shared_costs: KnownCosts | None = None
) -> MemoryPlan:
    """Return the plan of a configuration on `gpus` GPUs. Plans with the same `shared_costs` are made faster.

    Raises:
        ValueError: The layout does not divide GPUs, model or batch; the message says what to change.
    """
    validate(config, gpus)
    shared_costs = shared_costs or KnownCosts()
    image = shared_costs.image = shared_costs.image or costs.image_cost(config, description)
    parallel = config.parallel
    split = (parallel.tp, parallel.cp, parallel.ep, config.train.micro_batch_size, config.data.seq_length)
    loaded = replace(config, model=replace(config.model, load_weights=True))  # nothing is drawn at random
    stage_costs = costs.stage_costs(config, description.architecture, image)
    megatron_config = language_model_config(loaded, description.architecture, stage_costs)
    if split not in shared_costs.pieces:
        shared_costs.pieces[split] = measure_pieces(config, description)
    ranks = _Ranks(config, megatron_config, description.architecture, shared_costs.pieces[split], image, gpus)
    stages = tuple(ranks.stage(number) for number in range(parallel.pp))
    return MemoryPlan(config, description, gpus, stages, image)


def forwards_kept(config: RunConfig, micro_batches: int, stage: int) -> float:
    """Return how many micro batches' activations a stage keeps at a time in Megatron's 1F1B schedules."""
    pp = config.parallel.pp
    vpp = config.parallel.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a layout; `stage` puts together what the ranks of one stage hold."""

    config: RunConfig
    megatron_config: LanguageModelConfig
    architecture: dict
    pieces: Pieces
    image: costs.ImageCost
    gpus: int

    def stage(self, number: int) -> Stage:
        config = self.config
        parallel = config.parallel
        layers = tuple(stage_layers(self.megatron_config, number, v) for v in range(parallel.vpp))
        parameters = self._parameters(number, layers)
        total = parameters["dense"] + parameters["experts"]
        trained = parameters["trained_dense"] + parameters["trained_experts"]
        updated = trained
        if parallel.distributed_optimizer:  # each rank of those that hold the same updates its share
            dense = parameters["trained_dense"] / (self.gpus // (parallel.tp * parallel.pp))
            updated = dense + parameters["trained_experts"] / (self.gpus // (parallel.pp * parallel.ep))
        gradient = 4 if config.optimizer.reduce_in_fp32 else self._value
        activations = self._activations(number, layers)
        if number == 0 and parallel.tp > 1:  # the tower's gradients, joined, for their mean over the ranks
            activations = max(activations, 4 * self.pieces.vision["trained_dense"])
        if gradient < 4:  # Adam takes them in fp32, when activations are gone
            activations = max(activations, 4 * updated)
        state = updated * (12 if self._value == 2 else 8)
        return Stage(
            layers=layers,
            parameters=total,
            weights=self._value * (total + costs.reference_passes(config) * trained),
            gradients=gradient * trained,
            optimizer=0 if config.optimizer.offload else state,
            offloaded=state if config.optimizer.offload else 0,
            activations=activations,
            flops=self._flops(layers, costs.layer_flops) + self._other_flops(number),
            attention_flops=self._flops(layers, costs.attention_flops),
        )

    @property
    def _value(self) -> int:
        """The bytes of a number of the model's dtype."""
        return DTYPES[self.config.model.dtype].itemsize

    def _parameters(self, number: int, layers: Sequence[range]) -> Parameters:
        pieces = self.pieces
        parts = [pieces.layers[i] for i in chain.from_iterable(layers)]
        first = number == 0
        last = number == self.config.parallel.pp - 1
        if first:
            parts += [pieces.vision, pieces.inputs]
        if last:
            parts += [pieces.outputs]
        if last and not (first and len(layers) == 1):
            parts += [pieces.tied_outputs]
        return sum(parts, Counter())

    def _flops(self, layers: Sequence[range], of_token: Callable[[dict, int, int], float]) -> float:
        """Operations of layers in all passes of a micro batch; `of_token`: a token's in a forward pass."""
        again = {i for part in layers for i in recomputed_layers(self.config, part)}
        passes = costs.language_model_passes(self.config)
        length = self.config.data.seq_length
        return self._tokens * sum(
            of_token(self.architecture, i, length) * (passes + (i in again))
            for i in chain.from_iterable(layers)
        )

    @property
    def _tokens(self) -> float:
        """Tokens of a micro batch for each rank that shares its products."""
        tokens = self.config.train.micro_batch_size * self.config.data.seq_length
        return tokens / (self.config.parallel.tp * self.config.parallel.cp)

    def _other_flops(self, number: int) -> float:
        """Operations of the output layer and of the tower, if the stage has them."""
        config = self.config
        flops = 0.0
        if number == config.parallel.pp - 1:
            passes = costs.language_model_passes(config)
            flops += self._tokens * passes * costs.output_flops(self.architecture)
        if number == 0:
            images = config.train.micro_batch_size * costs.images_per_tower(config, self.image)
            flops += costs.vision_passes(config, self.image) * images * self.image.flops
        return flops

    def _activations(self, stage: int, layers: Sequence[range]) -> float:
        """The most bytes that the stage's ranks keep at any time: what forward passes keep for the backward,
        and what the backward needs besides for the output layer or for a recomputed layer, whichever is more.
        When a tower's layer is recomputed, the language model's layers of that micro batch are done."""
        config = self.config
        rows = config.train.micro_batch_size
        tokens = rows * config.data.seq_length / config.parallel.cp
        towers_again = config.model.recompute == "full"
        hidden = tokens * self._value * self.megatron_config.hidden_size
        # what the layers of one micro batch keep
        recomputed = [i for part in layers for i in recomputed_layers(config, part)]
        not_recomputed = [i for i in chain.from_iterable(layers) if i not in recomputed]
        kept = sum(self.pieces.saved[i] for i in not_recomputed)
        if config.model.recompute == "selective":
            kept -= sum(self.pieces.cheap[i] for i in not_recomputed)
        kept_of_virtual_stage = kept / len(layers)
        kept += self._recomputed(tokens, hidden, recomputed)
        masks = len(set(self.megatron_config.layer_windows)) or 1 if config.model.attention == "dense" else 0
        kept += self._value * masks * tokens * rows * config.data.seq_length
        # and of as many as the schedule has on their way, with their images
        forwards = forwards_kept(config, derived(config, self.gpus)["micro_batches_per_step"], stage)
        saved = forwards * kept
        images = rows * costs.images_per_tower(config, self.image)
        if stage == 0:
            saved += images * forwards * self.image.kept(towers_again)
            saved += rows * costs.images_per_row(config, self.image) * self.image.pixel_bytes  # on all ranks
        # a layer's input from all tensor-parallel ranks, and the gradient that goes back to them
        besides = 2 * hidden if self.megatron_config.sequence_parallel else 0.0
        besides += self._workspace(int(tokens), list(chain.from_iterable(layers)))
        if recomputed:  # by then the micro batch's other layers are done, and what they kept is free
            besides += max(0.0, max(self.pieces.saved[i] for i in recomputed) - kept_of_virtual_stage)
            if any(has_experts(self.megatron_config, i) for i in recomputed):  # gradients on their way
                trained = "language_model" not in config.frozen
                besides += (2 + trained) * hidden / self._cut * self.megatron_config.moe_router_topk
        if stage == config.parallel.pp - 1:
            besides = max(besides, self._output_layer(tokens))
        if stage == 0:
            tower = self.image.made_again(towers_again) + self.image.workspace
            besides = max(besides, images * tower - kept)
        return saved + besides

    def _workspace(self, tokens: int, layers: list[int]) -> int:
        """The most bytes that attention's kernels hold of one layer, for rows of one document."""
        if self._value > 2 or self.config.model.attention == "dense":
            return 0
        sizes = self.megatron_config
        tp = self.config.parallel.tp
        kinds = {heads_of(sizes, i)[:2] for i in layers if not is_recurrent(sizes, i)}
        length = self.config.data.seq_length
        return max(
            most_workspace(
                (tokens, sizes.num_attention_heads // tp, channels),
                (tokens, groups // tp, channels),
                self.config.train.micro_batch_size,
                (length, length),
            )
            for channels, groups in kinds or [(0, 0)]
        )

    @property
    def _cut(self) -> int:
        """Among how many ranks the tokens of hidden states are divided."""
        return self.config.parallel.tp if self.megatron_config.sequence_parallel else 1

    def _recomputed(self, tokens: float, hidden: float, layers: list[int]) -> float:
        """Bytes that recomputed layers keep: hidden states, of the first ones with visual features for later
        layers; an input of each layer's own, with its gradient and what its norm had; keys and values that a
        layer lends to others, with their gradients."""
        sizes = self.megatron_config
        kept = hidden / self._cut * sum(1 + extras_before(sizes, i + 1) for i in layers)
        kept += 3 * tokens * self._value * sizes.layer_inputs / self._cut * len(layers)
        lenders = {heads.source for heads in sizes.layer_heads}.intersection(layers)
        lent = sum(heads.groups * heads.channels for heads in (heads_of(sizes, i) for i in lenders))
        return kept + 4 * tokens * self._value * lent / self.config.parallel.tp

    def _output_layer(self, tokens: float) -> float:
        """Bytes of `models.head`: hidden states and their gradient; a chunk of logits and its softmax, with
        the slope of their cap in fp32. After these: what stands for the weight's gradient, which lies in
        Megatron's buffer."""
        vocabulary = self.megatron_config.vocab_size / self.config.parallel.tp
        logits = 4 * tokens * (1 - self.config.data.visual_share) * vocabulary  # images are not trained
        width = self._value * self.megatron_config.hidden_size
        chunks = 2.5 if self.megatron_config.logit_softcap else 2
        trained = "language_model" not in self.config.frozen
        return 2 * tokens * width + max(chunks * min(CHUNK_BYTES, logits), trained * vocabulary * width)


def measure_pieces(config: RunConfig, description: Description) -> Pieces:
    """Return the pieces under the run's tensor, context and expert parallelism.

    The real model is built on shapes, without pipeline stages, and its first layers are run, until each kind
    of layer was met. So no formula repeats what the model does.
    """
    config = as_on_a_gpu(config)
    config.model.recompute = "none"
    config.parallel = replace(config.parallel, pp=1, vpp=1)
    gpus = fewest_processes(config.parallel)  # on more of them a rank has the same pieces
    config.train.global_batch_size = config.train.micro_batch_size * gpus
    with on_shapes(config, description, gpus, 0):
        [model] = model_on_shapes(config, description)
        layers: list[Parameters] = [Counter() for _ in range(model.config.num_layers)]
        kinds: list[list[Hashable]] = [[] for _ in layers]
        other_parts: dict[str, Parameters] = defaultdict(Counter)
        for name, parameter in _named_parameters(model):
            if name.startswith(LAYERS):
                number, _, part = name.removeprefix(LAYERS).partition(".")
                layers[int(number)] += _count(name, parameter)
                kinds[int(number)].append((part, parameter.shape, parameter.requires_grad))
            else:
                other_parts[_place(name)] += _count(name, parameter)
        saved, cheap = _saved_by_layers(config, description, model, [tuple(kind) for kind in kinds])
    tied_outputs = other_parts["embedding"] if model.config.tie_embeddings else Counter()
    inputs = other_parts["embedding"] + other_parts["inputs"]
    return Pieces(layers, saved, cheap, other_parts["vision"], inputs, other_parts["outputs"], tied_outputs)


def _named_parameters(model: VLMModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Give adapters' parameters the name of the weight that they adapt."""
    yield from (pair for pair in model.named_parameters() if not pair[0].startswith("adapters."))
    for lora in model.adapters.children() if model.adapters else ():
        yield from ((lora.target.weight, parameter) for parameter in lora.parameters())


def _count(name: str, parameter: nn.Parameter) -> Parameters:
    kind = "experts" if ".experts." in name else "dense"
    size = parameter.numel()
    return Counter({kind: size, f"trained_{kind}": size * parameter.requires_grad})


def _place(name: str) -> str:
    if name.startswith("vision."):
        return "vision"
    if ".embedding." in name:
        return "embedding"
    is_last = name.startswith(("language_model.output_layer.", "language_model.decoder."))
    return "outputs" if is_last else "inputs"


def _saved_by_layers(
    config: RunConfig, description: Description, model: VLMModel, kinds: Sequence[Hashable]
) -> tuple[list[float], list[float]]:
    """Return the bytes that each layer keeps, and how many of them are outputs of norms and gates."""
    # the second layer of a kind is measured, as the first may keep what all share, such as rotary tables
    measured = {kind: [i for i, other in enumerate(kinds) if other == kind][:2][-1] for kind in kinds}
    decoder = model.language_model.decoder
    decoder.layers = decoder.layers[: max(measured.values()) + 1]
    running: list[int | None] = [None]
    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: running.append(number))
        layer.register_forward_hook(lambda *_: running.append(None))
    kept: list[tuple[int | None, Tensor]] = []
    [stream] = streams_of([model], [example_batch(config, description) | {"visual_inputs": None}])
    tokens = stream.input_ids.shape[1]
    if config.parallel.sequence_parallel:
        tokens //= config.parallel.tp
    hidden = torch.empty(tokens, 1, model.config.hidden_size, dtype=model.config.params_dtype, device=META)
    with (
        cheap_outputs() as cheap_storages,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((running[-1], t)), lambda t: t),
    ):
        model.language_model.outputs(stream, hidden.requires_grad_(), output_losses)
    counted = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: Counter[int | None] = Counter()
    cheap: Counter[int | None] = Counter()
    for number, tensor in kept:
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage._cdata not in counted:
            counted.add(storage._cdata)
            saved[number] += storage.nbytes()
            cheap[number] += storage.nbytes() * (storage._cdata in cheap_storages)
    kept.clear()  # the graph holds the hook, which holds these, which hold it
    return [saved[measured[kind]] for kind in kinds], [cheap[measured[kind]] for kind in kinds]


# --- as lines of text ---------------------------------------------------------------------------------------


def describe(plan: MemoryPlan, capacity: float) -> Iterator[str]:
    """Give the plan as text: a line for each stage, the assumptions, and whether it fits."""
    config = plan.config
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    layout = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tp")
    # the layout, a line for each stage, then what was assumed
    numbers = derived(config, plan.gpus)
    yield (
        f"{config.name} on {plan.gpus} GPU{'s' * (plan.gpus > 1)}: {layout} · dp {numbers['data_parallel']}; "
        f"{numbers['micro_batches_per_step']} micro batches of {config.train.micro_batch_size} × "
        f"{config.data.seq_length} tokens a step\n"
    )
    parts = (*PARTS, "memory")
    rows = [("stage", "layers", "parameters", *parts, "work")]
    mean = sum(stage.flops for stage in plan.stages) / len(plan.stages)
    for number, stage in enumerate(plan.stages):
        layers = " ".join(f"{part.start}-{part.stop - 1}" for part in stage.layers)
        memory = (f"{getattr(stage, part) / 1e9:.1f}" for part in parts)
        rows.append((str(number), layers, f"{stage.parameters:,}", *memory, f"{stage.flops / mean:.2f}"))
    yield from aligned(rows, ">")
    yield (
        "\nParameters are exact. Memory is an estimate in GB (10^9 bytes) for each rank of the stage, with "
        f"{RESERVE / 1e9:.1f} in reserve."
    )
    yield (
        f"Rows have {costs.images_per_row(config, plan.image):.1f} images of {plan.image.tokens} visual "
        f"tokens (data.visual_share {config.data.visual_share:g}, data.max_pixels "
        f"{config.data.max_pixels or costs.DEFAULT_IMAGE})."
    )
    if config.optimizer.offload:
        offloaded = max(stage.offloaded for stage in plan.stages)
        yield (
            f"Adam keeps {offloaded / 1e9:.1f} GB for each rank in its host's memory, pinned; a checkpoint's "
            "copy takes as much again."
        )
    # the last line says whether it fits and, if not, what to change
    need = (
        f"the fullest rank, of stage {plan.fullest}, needs {plan.memory / 1e9:.0f} of {capacity / 1e9:.0f} GB"
    )
    if plan.memory <= capacity:
        yield f"It fits: {need}."
    else:
        yield (
            f"It does not fit: {need}. Try model.recompute=full, optimizer.offload=true, a larger tp "
            "or more GPUs; `plan --gpus N --search` finds layouts of N GPUs that fit."
        )


def figures(plan: MemoryPlan, capacity: float) -> dict[str, Any]:
    """Return what `describe` says as numbers by name: bytes, parameters and operations of a rank."""
    stages = [
        asdict(stage) | {"layers": [[*part] for part in stage.layers], "memory": stage.memory}
        for stage in plan.stages
    ]
    about = {"name": plan.config.name, "gpus": plan.gpus, "parallel": asdict(plan.config.parallel)}
    about |= {"memory": plan.memory, "capacity": capacity, "fits": plan.memory <= capacity}
    return about | derived(plan.config, plan.gpus) | {"stages": stages}


def rehearsed(plan: MemoryPlan, rank: int | None) -> Iterator[str]:
    """Give lines about what each rank holds and sends in a real step, beside the plan."""
    for number in plan.representatives if rank is None else [rank]:
        rehearsal = rehearse(plan.config, plan.description, plan.gpus, number)
        planned = plan.stages[rehearsal.stage].memory - RESERVE
        sizes = ", ".join(f"{part} {getattr(rehearsal, part) / 1e9:.1f}" for part in PARTS)
        yield (
            f"\nRank {number}, of stage {rehearsal.stage}, rehearsed: {rehearsal.peak / 1e9:.1f} GB at most "
            f"({sizes}); the plan says {planned / 1e9:.1f}, {planned / rehearsal.peak:.2f} of it."
        )
        for (group, kind), (calls, nbytes) in sorted(rehearsal.exchanged().items()):
            yield f"  {group}: {kind}, {calls:,.0f} calls, {nbytes / 1e9:,.2f} GB a step"
