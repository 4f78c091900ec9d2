"""Parameters of adapters, activations, and memory of its host that a rank of a run holds."""

import re
from collections import Counter
from math import prod

from megatron_vlm.config import ParallelConfig, RunConfig
from megatron_vlm.config_rules.peft_config import settled
from megatron_vlm.models.adapters.targets import find_targets, find_whole
from megatron_vlm.models.description import Description
from megatron_vlm.models.head import CHUNK_BYTES
from megatron_vlm.models.language_model import DTYPES, LanguageModelConfig, has_experts
from megatron_vlm.models.layers.attention_sizes import (
    DeltaHeads,
    LatentHeads,
    feed_forward_width,
    heads_of,
    is_recurrent,
)
from megatron_vlm.models.layers.delta_net.layer import sizes_of_head
from megatron_vlm.models.layers.delta_net.rule import CHUNK
from megatron_vlm.models.work import costs

# --- the host--------------------------------------------------------------------------------------------

# Numbers of one rank: "dense" and "experts", apart as other ranks hold the experts' optimizer state, and
# "trained_dense" and "trained_experts" of them
Parameters = Counter[str]


def share(parameters: Parameters, which: str, parallel: ParallelConfig, gpus: int) -> float:
    """The parameters, all ("") or those that are "trained_", divided by the ranks that hold them."""
    dense = parameters[f"{which}dense"] / (gpus // (parallel.tp * parallel.pp))
    return dense + parameters[f"{which}experts"] / (gpus // (parallel.pp * parallel.ep))


def host_memory(
    config: RunConfig, parameters: Parameters, image: costs.ImageCost, gpus: int, has_tower: bool
) -> dict[str, float]:
    """Bytes besides programs and data workers, by what they are for: the part of a checkpoint that the rank
    writes, and uint8 pixels of the step that is trained and of the next."""
    value = DTYPES[config.model.dtype].itemsize
    weights = share(parameters, "trained_" if config.adapter.used else "", config.parallel, gpus)
    rows = has_tower * config.train.global_batch_size * config.parallel.model_size / gpus
    return {
        "its part of a checkpoint": value * weights
        + 12 * share(parameters, "trained_", config.parallel, gpus),
        "pixels": 2 * rows * costs.images_per_row(config, image) * image.pixel_bytes / value,
    }


# --- adapters: how many parameters they have on a rank---------------------------------------------------

ATTENTION, FEED_FORWARD, EXPERTS = "self_attention", "mlp", "experts"
_LAYER = re.compile(rf"language_model\.decoder\.layers\.(\d+)\.({ATTENTION}|{FEED_FORWARD})?")
FIRST, LAST = -1, -2  # what comes before the layers, and after them


def saved_sizes(config: RunConfig, description: Description) -> Counter[int | None]:
    """Numbers of parameters on one rank that are trained whole, by layer, or FIRST or LAST; None: the
    parameters of tower and projector."""
    sizes: Counter[int | None] = Counter()
    adapter = settled(config.adapter)
    for weight, saved in find_whole(adapter, description).items():
        layer = _LAYER.match(weight)
        place = LAST if weight.startswith("language_model.") else None
        place = FIRST if ".embedding." in weight and place == LAST else place
        parts = 1 if saved.rule.operation.axis is None else config.parallel.tp
        sizes[int(layer[1]) if layer else place] += sum(map(prod, saved.shapes)) // parts
    return sizes


def adapter_sizes(config: RunConfig, description: Description) -> Counter[tuple[int | None, str | None]]:
    """Numbers of parameters on one rank: by layer of the language model and part of it (ATTENTION,
    FEED_FORWARD, EXPERTS: the routed ones); (None, None): tower and projector."""
    sizes: Counter[tuple[int | None, str | None]] = Counter()
    adapter = settled(config.adapter)
    targets = find_targets(adapter, description) if adapter.r else []
    for target in targets:
        cut = [target.width, target.out]  # of A, of B
        axis = target.rule.operation.axis
        if axis is not None:
            cut[1 - axis] //= config.parallel.tp
        layer = _LAYER.match(target.weight)
        place = (int(layer[1]), EXPERTS if target.experts else layer[2]) if layer else (None, None)
        copies = target.experts // config.parallel.ep or 1
        sizes[place] += copies * target.rank * sum(cut) + target.dora * cut[1]
    return sizes


# --- activations: what a forward pass keeps for its backward pass----------------------------------------


def saved_by_layer(
    megatron_config: LanguageModelConfig,
    layer: int,
    value: int,
    attention: bool,
    feed_forward: bool,
    dropout: bool = False,
) -> float:
    """Bytes per token that a layer saves for its backward pass; `value` is the size of a number.

    Norms save their input and its root mean square in fp32; projections save their inputs; attention its
    queries, keys, values and output, where a document that all ranks of context parallelism share gives a
    rank up to all of its keys and values; a gated feed-forward its gate and up, and their product for the
    next projection. Of `attention` and `feed_forward`, one that is not trained and has no adapters saves only
    what the gradient of its input needs. Dropout of adapters' inputs saves a byte for each input of the
    linears, and the output of attention once more.
    """
    tp = megatron_config.tensor_model_parallel_size
    cut = tp if megatron_config.sequence_parallel else 1
    width = megatron_config.hidden_size / cut
    norm = value * width + 4 / cut
    channels = (2 + feed_forward) * value  # of a gated feed-forward
    heads = heads_of(megatron_config, layer)
    queries = megatron_config.num_attention_heads * heads.channels / tp
    keys = heads.groups * heads.channels / tp
    saved = 2 * norm + (attention + feed_forward) * value * width
    if megatron_config.norm_after_sublayer:
        saved += 2 * norm
    if is_recurrent(megatron_config, layer):
        saved += _saved_by_delta_net(megatron_config.delta_heads, value) / tp
    elif latent := megatron_config.latent_heads:
        saved += _saved_by_latents(megatron_config, latent, value, cut)
    else:
        saved += (
            value * (3 * queries + (1 + 2 * megatron_config.context_parallel_size) * keys)
            + 4 * megatron_config.num_attention_heads / tp
        )
        if megatron_config.qk_layernorm:  # keys lie where values do
            saved += value * queries + 4 * (queries + keys) / heads.channels
        if megatron_config.attention_output_gate:  # the gate, its sigmoid, and the context times it
            saved += 3 * value * queries
    if own := megatron_config.layer_inputs:  # it and its gradient; hidden states, gate and what it lets pass
        saved += value * (2 * width + 5 * own / cut) + norm
    experts = has_experts(megatron_config, layer)
    inner = feed_forward_width(megatron_config, layer)
    if experts:
        inner = megatron_config.moe_shared_expert_intermediate_size or 0
    saved += channels * inner / tp
    if dropout:
        saved += attention * (width + (1 + value) * queries) + feed_forward * (width + inner / tp)
    if not experts:
        return saved
    routed = channels * megatron_config.moe_ffn_hidden_size
    routed += feed_forward * value * megatron_config.hidden_size
    return saved + megatron_config.moe_router_topk * routed / cut


def saved_asides(megatron_config: LanguageModelConfig, layer: int, value: int) -> float:
    """Bytes per token that a layer which is recomputed keeps besides its hidden states: the input of its own,
    with its gradient and what its norm had; keys and values that it lends to others, with their gradients."""
    tp = megatron_config.tensor_model_parallel_size
    cut = tp if megatron_config.sequence_parallel else 1
    lends = any(heads.source == layer for heads in megatron_config.layer_heads)
    heads = heads_of(megatron_config, layer)
    lent = lends * 2 * heads.groups * heads.channels / tp
    return value * (3 * megatron_config.layer_inputs / cut + 2 * lent)


def _saved_by_latents(config: LanguageModelConfig, heads: LatentHeads, value: int, cut: int) -> float:
    """Latents before and after their norms, with the shared key; attention's queries, keys, values and output
    in their one width; and, where zeros fill that up, what the last linear takes, else the plain channels of
    keys, which lie where values do."""
    of_head = (2 + 2 * config.context_parallel_size) * heads.channels
    of_head += heads.value if heads.value < heads.channels else heads.plain
    latents = 2 * ((heads.query_rank or 0) + heads.rank) + heads.turned
    number = config.num_attention_heads / config.tensor_model_parallel_size
    return number * (value * of_head + 4) + (value * latents + 8) / cut


def _saved_by_delta_net(heads: DeltaHeads, value: int) -> float:
    """The rows of the first linear; what is convolved, before and after; the outputs of the rule, before and
    after their gate; decay and strength, with what they are made from; and a state for each chunk."""
    rows = heads.keys * sum(sizes_of_head(heads))
    outputs = heads.values * heads.value_channels
    numbers = rows + 2 * heads.convolved + 2 * outputs + 2 * heads.values
    return value * numbers + 3 * 4 * heads.values + 4 * heads.state / CHUNK


def saved_by_output_layer(
    config: RunConfig, megatron_config: LanguageModelConfig, tokens: float, trained: bool
) -> float:
    """Bytes of `models.head`: hidden states and their gradient; a chunk of logits and its softmax, with the
    slope of their cap in fp32. After these: what stands for the weight's gradient, which lies in Megatron's
    buffer."""
    value = DTYPES[config.model.dtype].itemsize
    vocabulary = megatron_config.vocab_size / config.parallel.tp
    logits = 4 * tokens * (1 - config.data.visual_share) * vocabulary  # images are not trained
    width = value * megatron_config.hidden_size
    chunks = 2.5 if megatron_config.logit_softcap else 2
    return 2 * tokens * width + max(chunks * min(CHUNK_BYTES, logits), trained * vocabulary * width)
