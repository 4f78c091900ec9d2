"""What a run asks of its GPUs, found out without one: parameters, memory, work, and what to change.

Parameters are counted on modules built without numbers, in the run's own layout: they are exact. Memory is an
estimate: weights, gradients and optimizer state are sums over those, activations what a layer saves for its
backward pass, and temporary buffers and fragmentation are a fixed reserve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_vlm.checks.settings import validate
from megatron_vlm.config import RunConfig, apply_overrides, derived, fewest_processes
from megatron_vlm.models import costs
from megatron_vlm.models.costs import ImageCost
from megatron_vlm.models.families import family_for
from megatron_vlm.models.families.base import Family
from megatron_vlm.models.language_model import (
    DTYPES,
    LanguageModelConfig,
    has_experts,
    language_model_config,
    layer_spec,
)
from megatron_vlm.models.vlm import check_divisible
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.layout import pipeline_layout

RESERVE = 4 * 2**30  # bytes for the CUDA context, communication buffers and fragmentation
MAX_IMBALANCE, MAX_BUBBLE = 1.15, 0.2  # above which the plan says what to change


@dataclass(frozen=True)
class Parameters:
    """Of one rank; experts apart, because other ranks hold their optimizer state."""

    dense: int = 0
    experts: int = 0
    trained_dense: int = 0
    trained_experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[int, ...]:
        return self.dense, self.experts, self.trained_dense, self.trained_experts

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Stage:
    """What each rank of one pipeline stage holds, in bytes, and its operations for one micro batch."""

    layers: tuple[range, ...]  # one range for each virtual stage
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    flops: float

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + RESERVE


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    gpus: int
    stages: tuple[Stage, ...]
    image: ImageCost
    images_per_row: float
    language_model_flops: float  # per token of a row, forward and backward
    tower_flops: float  # the same

    @property
    def fullest(self) -> int:
        """The stage whose ranks need most memory."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].memory)

    @property
    def memory(self) -> float:
        return self.stages[self.fullest].memory

    @property
    def imbalance(self) -> float:
        """Work of the busiest stage over the mean."""
        work = [stage.flops for stage in self.stages]
        return max(work) * len(work) / sum(work)

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits for others, were all stages equal (arXiv 2104.04473)."""
        waiting = (self.config.parallel.pp - 1) / self.config.parallel.vpp
        return waiting / (waiting + derived(self.run, self.gpus)["micro_batches_per_step"])


def make_plan(config: RunConfig, hf_config: Any, gpus: int, image: ImageCost | None = None) -> Plan:
    """The plan of a valid configuration on `gpus` GPUs; `image` where its cost is known already.

    Raises ConfigError or ValueError that says what to change where the layout divides neither GPUs nor model.
    """
    validate(config, gpus)
    family = family_for(hf_config)
    architecture = family.architecture(hf_config)
    image = image or costs.image_cost(config, family, hf_config)
    layout = pipeline_layout(*costs.stage_costs(config, architecture, image), config.parallel)
    megatron_config = language_model_config(config, architecture, layout)
    check_divisible(megatron_config)
    with setup.pretended(config.parallel, gpus), torch.device("meta"):
        held = _Held(config, megatron_config, family, hf_config)
    stages = tuple(
        _stage(config, megatron_config, architecture, held, image, gpus, i) for i in range(config.parallel.pp)
    )
    passes, per_row = costs.language_model_passes(config), costs.images_per_row(config, image)
    layers = sum(
        costs.layer_flops(architecture, i, config.data.seq_length) for i in range(megatron_config.num_layers)
    )
    return Plan(
        config=config,
        gpus=gpus,
        stages=stages,
        image=image,
        images_per_row=per_row,
        language_model_flops=passes * layers + min(3, passes) * costs.output_flops(architecture),
        tower_flops=costs.vision_passes(config) * image.flops * per_row / config.data.seq_length,
    )


class _Held:
    """Parameters of the model's pieces on one rank, from modules built on the meta device."""

    def __init__(
        self, config: RunConfig, megatron_config: LanguageModelConfig, family: Family, hf_config: Any
    ):
        trained = "language_model" not in config.model.freeze
        examples = {has_experts(megatron_config, i): i for i in range(megatron_config.num_layers)}
        self._config = megatron_config
        self._layers = {
            kind: _count(
                build_module(layer_spec(megatron_config, i), config=megatron_config, layer_number=i + 1),
                trained,
            )
            for kind, i in examples.items()
        }
        words = (
            megatron_config.vocab_size
            // megatron_config.tensor_model_parallel_size
            * megatron_config.hidden_size
        )
        self._words = Parameters(words, 0, words * trained, 0)
        self._norm = Parameters(megatron_config.hidden_size, 0, megatron_config.hidden_size * trained, 0)
        self._vision = _count_vision(family, hf_config, config.model.freeze)

    def stage(self, layers: tuple[range, ...], first: bool, last: bool) -> Parameters:
        """Of the stage that holds these layers."""
        total = Parameters()
        for i in (i for held in layers for i in held):
            total += self._layers[has_experts(self._config, i)]
        if first:
            total += self._words + self._vision
        if last:
            total += self._norm
        one_chunk = first and last and len(layers) == 1
        return total + self._words if last and not (one_chunk and self._config.tie_embeddings) else total


def _count(module: torch.nn.Module, trained: bool) -> Parameters:
    experts = sum(p.numel() for name, p in module.named_parameters() if ".local_experts." in name)
    dense = sum(p.numel() for p in module.parameters()) - experts
    return Parameters(dense, experts, dense * trained, experts * trained)


def _count_vision(family: Family, hf_config: Any, frozen: list[str]) -> Parameters:
    prefixes = tuple(prefix for group in frozen for prefix in family.groups[group])
    sizes = {f"vision.{n}": p.numel() for n, p in family.build_vision(hf_config).named_parameters()}
    trained = sum(size for name, size in sizes.items() if not name.startswith(prefixes))
    return Parameters(sum(sizes.values()), 0, trained, 0)


def _stage(
    config: RunConfig,
    megatron_config: LanguageModelConfig,
    architecture: dict,
    held: _Held,
    image: ImageCost,
    gpus: int,
    number: int,
) -> Stage:
    parallel, first, last = config.parallel, number == 0, number == config.parallel.pp - 1
    layout = megatron_config.pipeline_model_parallel_layout
    layers = tuple(
        range(start := layout.get_layer_offset(vp_stage=v, pp_rank=number), start + count)
        for v in range(parallel.vpp)
        for count in [layout.get_num_layers_to_build(vp_stage=v, pp_rank=number)]
    )
    parameters = held.stage(layers, first, last)
    value, state = (2, 12) if config.model.dtype == "bf16" else (4, 8)  # bytes of a weight, of Adam's for it
    dense_ranks = expert_ranks = 1
    if parallel.distributed_optimizer:
        dense_ranks = gpus // parallel.model_size
        expert_ranks = gpus // (parallel.pp * parallel.ep)
    tokens = config.train.micro_batch_size * config.data.seq_length
    images = config.train.micro_batch_size * costs.images_per_tower(config, image)
    lm_passes, seq_length = costs.language_model_passes(config), config.data.seq_length
    layers_flops = sum(costs.layer_flops(architecture, i, seq_length) for held in layers for i in held)
    flops = lm_passes * layers_flops + last * min(3, lm_passes) * costs.output_flops(architecture)
    return Stage(
        layers=layers,
        parameters=parameters.total,
        weights=value * parameters.total,
        gradients=4 * (parameters.trained_dense + parameters.trained_experts),
        optimizer=state
        * (parameters.trained_dense / dense_ranks + parameters.trained_experts / expert_ranks),
        activations=_activations(config, megatron_config, layers, image, gpus, number),
        flops=flops * tokens / parallel.tp + first * costs.vision_passes(config) * images * image.flops,
    )


def _activations(
    config: RunConfig,
    megatron_config: LanguageModelConfig,
    layers: tuple[range, ...],
    image: ImageCost,
    gpus: int,
    stage: int,
) -> float:
    """Bytes that the stage's ranks keep at the moment when they keep most."""
    rows, seq_length, tp = config.train.micro_batch_size, config.data.seq_length, config.parallel.tp
    value = DTYPES[config.model.dtype].itemsize
    per_layer = [
        rows * seq_length * saved_by_layer(megatron_config, i, value) for held in layers for i in held
    ]
    kept = sum(per_layer)
    if config.model.recompute == "full":
        cut = tp if megatron_config.sequence_parallel else 1
        inputs = rows * seq_length * value * megatron_config.hidden_size / cut
        kept = inputs * len(per_layer)
    forwards = forwards_kept(config, derived(config, gpus)["micro_batches_per_step"], stage)
    windows = len(set(megatron_config.layer_windows)) or 1
    kept = forwards * (kept + value * windows * rows * seq_length**2)
    if config.model.recompute == "full":
        kept += max(per_layer)
    if stage == 0 and costs.vision_passes(config) > 1:
        images = rows * costs.images_per_tower(config, image)
        kept += images * image.kept(config.model.recompute == "full", forwards)
    if stage == config.parallel.pp - 1:  # logits, their fp32 softmax, their gradient
        kept += rows * seq_length * megatron_config.vocab_size / tp * (4 + 2 * value)
    return kept


def forwards_kept(config: RunConfig, micro_batches: int, stage: int) -> float:
    """Micro batches whose activations a stage keeps at once, under Megatron's 1F1B schedules."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp


def saved_by_layer(megatron_config: LanguageModelConfig, layer: int, value: int) -> float:
    """Bytes that a layer saves for its backward pass, for each token; `value` is the size of a number.

    Norms save their input in fp32, its normalised values and their own output; projections their inputs;
    attention its queries, keys, values and output; a gated feed-forward five times its channels.
    """
    tp = megatron_config.tensor_model_parallel_size
    cut = tp if megatron_config.sequence_parallel else 1
    norm, width = 4 + 2 * value, megatron_config.hidden_size / cut
    queries = megatron_config.num_attention_heads * megatron_config.kv_channels / tp
    keys = megatron_config.num_query_groups * megatron_config.kv_channels / tp
    saved = norm * width * (4 if megatron_config.norm_after_sublayer else 2)
    saved += value * (3 * queries + 3 * keys) + 4 * megatron_config.num_attention_heads / tp
    if megatron_config.qk_layernorm:
        saved += norm * (queries + keys)
    if not has_experts(megatron_config, layer):
        return saved + 5 * value * megatron_config.ffn_hidden_size / tp
    saved += 5 * value * (megatron_config.moe_shared_expert_intermediate_size or 0) / tp
    routed = 5 * value * megatron_config.moe_ffn_hidden_size + 2 * value * megatron_config.hidden_size
    return saved + megatron_config.moe_router_topk * routed / cut


# --- advice ----------------------------------------------------------------------------------------------


def ways_to_fit(plan: Plan, hf_config: Any, capacity: float) -> list[tuple[str, Plan]]:
    """Changes under which the fullest rank fits into `capacity` bytes, and their plans.

    Single ones, or where none is enough pairs; empty where no pair is either.
    """
    changes = list(_changes(plan.config))
    for together in (1, 2):
        tried = ((pair, _changed(plan, pair, hf_config)) for pair in combinations(changes, together))
        found = [(" ".join(pair), other) for pair, other in tried if other and other.memory <= capacity]
        if found:
            return found
    return []


def _changes(config: RunConfig) -> Iterator[str]:
    """Settings worth trying, the cheapest first."""
    parallel, rows = config.parallel, config.train.micro_batch_size
    if rows > 1:
        yield f"train.micro_batch_size={rows // 2}"
    if config.model.recompute != "full":
        yield "model.recompute=full"
    yield from (f"parallel.tp={tp}" for tp in (2, 4, 8) if tp > parallel.tp)
    yield from (f"parallel.pp={parallel.pp * more}" for more in (2, 4))
    yield f"parallel.ep={parallel.ep * 2}"
    yield f"data.seq_length={config.data.seq_length // 2}"


def _changed(plan: Plan, settings: tuple[str, ...], hf_config: Any) -> Plan | None:
    """The plan under other settings, on more GPUs where these need more; None where nothing divides."""
    config = apply_overrides(plan.config, settings)
    fewest = fewest_processes(config.parallel)
    try:
        return make_plan(config, hf_config, -(-plan.gpus // fewest) * fewest, plan.image)
    except ValueError:
        return None


# --- words -----------------------------------------------------------------------------------------------


def describe(plan: Plan) -> str:
    """The plan as text: a line for each stage, and what it rests on."""
    config, parallel = plan.config, plan.config.parallel
    sizes = [("tp", parallel.tp), ("pp", parallel.pp), ("vpp", parallel.vpp), ("ep", parallel.ep)]
    layout = " · ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "tp")
    facts = derived(config, plan.gpus)
    per_row, tokens = plan.images_per_row, plan.image.tokens
    lines = [
        f"{config.name} on {_gpus(plan)}: {layout} · dp {facts['data_parallel']}; "
        f"{facts['micro_batches_per_step']} micro batches of {config.train.micro_batch_size} × "
        f"{config.data.seq_length} tokens a step",
        "",
        *_table(plan),
        "",
        "Parameters are exact; GB (10^9 bytes) of memory an estimate, for each rank of the stage, with "
        f"{RESERVE / 1e9:.1f} in reserve.",
        f"Operations for each token: {_flops(plan.language_model_flops)} in the language model, "
        f"{_flops(plan.tower_flops)} in the tower,",
        f"with {per_row:.1f} images of {tokens} visual tokens in a row (data.visual_share "
        f"{config.data.visual_share:g}, data.max_pixels {config.data.max_pixels or costs.DEFAULT_IMAGE}).",
    ]
    if parallel.pp > 1:
        lines.append(
            f"Pipeline: the busiest stage has {plan.imbalance:.2f} of the mean work; stages wait for one "
            f"another {plan.bubble:.0%} of a step."
        )
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    memory = ("weights", "gradients", "optimizer", "activations", "GB")
    heads = ("stage", "layers", "parameters", *memory, "work")
    mean = sum(stage.flops for stage in plan.stages) / len(plan.stages)
    rows = [heads]
    for number, stage in enumerate(plan.stages):
        parts = (stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.memory)
        rows.append(
            (
                str(number),
                " ".join(f"{held.start}-{held.stop - 1}" for held in stage.layers),
                f"{stage.parameters:,}",
                *(f"{size / 1e9:.1f}" for size in parts),
                f"{stage.flops / mean:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _gpus(plan: Plan) -> str:
    return f"{plan.gpus} GPU" + "s" * (plan.gpus > 1)


def _flops(count: float) -> str:
    return f"{count / 1e9:.1f} GFLOP"


def advice(plan: Plan, hf_config: Any, capacity: float) -> Iterator[str]:
    """What to change, a line each: first whether the fullest rank fits into `capacity` bytes."""
    need = f"{plan.memory / 1e9:.0f} of {capacity / 1e9:.0f} GB"
    if plan.memory <= capacity:
        yield f"It fits: the fullest rank, of stage {plan.fullest}, needs {need}."
    else:
        yield f"It does not fit: the fullest rank, of stage {plan.fullest}, needs {need}."
        ways = ways_to_fit(plan, hf_config, capacity)
        for change, other in ways:
            yield f"  {change}: {other.memory / 1e9:.0f} GB on {_gpus(other)}"
        if not ways:
            yield "  No change of recomputation, tp, pp, ep or seq_length, alone or with another, is enough."
    if plan.imbalance > MAX_IMBALANCE:
        yield from _against_imbalance(plan)
    if plan.bubble > MAX_BUBBLE:
        config = plan.config
        yield (
            f"Stages wait {plan.bubble:.0%} of a step: raise train.global_batch_size above "
            f"{config.train.global_batch_size}, or vpp above {config.parallel.vpp}."
        )


def _against_imbalance(plan: Plan) -> Iterator[str]:
    busiest = max(range(len(plan.stages)), key=lambda i: plan.stages[i].flops)
    remedy = "use fewer or more stages"
    if busiest == 0 and plan.config.parallel.tp > 1 and not plan.config.parallel.images_spread:
        remedy = "spread its images: parallel.vision_dp=true"
    elif busiest == 0 and sum(map(len, plan.stages[0].layers)) == plan.config.parallel.vpp:
        remedy = "its tower alone is more than a stage's share: lower pp"
    yield f"Stage {busiest} has {plan.imbalance:.2f} of the mean work; {remedy}."
