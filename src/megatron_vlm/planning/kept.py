"""Estimates of what a forward pass keeps for its backward pass."""

from __future__ import annotations

from megatron_vlm.config import RunConfig
from megatron_vlm.models.attention_sizes import heads_of
from megatron_vlm.models.head import CHUNK_BYTES
from megatron_vlm.models.language_model import DTYPES, LanguageModelConfig, has_experts


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
    saved += (
        value * (3 * queries + (1 + 2 * megatron_config.context_parallel_size) * keys)
        + 4 * megatron_config.num_attention_heads / tp
    )
    if megatron_config.qk_layernorm:  # keys lie where values do
        saved += value * queries + 4 * (queries + keys) / heads.channels
    experts = has_experts(megatron_config, layer)
    inner = megatron_config.ffn_hidden_size
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


def saved_by_output_layer(
    config: RunConfig, megatron_config: LanguageModelConfig, tokens: float, trained: bool
) -> float:
    """Bytes of `models.head`: a chunk of logits and its softmax, hidden states and their gradient, and the
    weight's gradient, of which a chunk's part is added to the sum in fp32."""
    value = DTYPES[config.model.dtype].itemsize
    vocabulary = megatron_config.vocab_size / config.parallel.tp
    logits = 4 * tokens * (1 - config.data.visual_share) * vocabulary  # images are not trained
    weight = vocabulary * megatron_config.hidden_size
    several = logits > CHUNK_BYTES
    return (
        2 * min(CHUNK_BYTES, logits)
        + 2 * tokens * value * megatron_config.hidden_size
        + trained * weight * (2 * value + 4 if several else value)
    )
