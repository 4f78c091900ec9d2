"""The output layer: loss, log-probability and the like of the wanted tokens, without the logits of a row.

Hidden states of other tokens are dropped first. The rest goes through the output layer in chunks, and each
chunk's logits are reduced to a few numbers per token. The backward computes them again, except the
last chunk's, which are kept: so the most that is ever held is one chunk. What is between the products is one
function in each direction, compiled on CUDA.
"""

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.profiler import record_function

from megatron_vlm.models.layers.fused import Fused, statistics_dtype
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel.linears import gradient_of, sum_for, wgrad_gemm_accum_fp32

CHUNK_BYTES = 2**30  # of the fp32 logits at a time; each chunk reads and writes the gradient of the weight
# What `token_statistics` can tell of each token: log p of its label, the log of the sum of exponentials of
# the logits, the entropy of its distribution, and the mean of log p over the vocabulary
STATISTICS = ("log_probs", "logsumexp", "entropies", "mean_log_probs")
NEVER = -1e9  # a logit whose probability is zero; finite, as 0 * inf is not a number


def output_losses(**arguments) -> Tensor:
    """Megatron's `output_processor`: the loss (n,) of each trained token, fp32."""
    return -output_statistics(("log_probs",), **arguments)[0]


@record_function("head")
def output_statistics(
    names: Sequence[str],
    temperature: float = 1.0,
    *,
    hidden_states: Tensor,
    output_layer,
    output_weight,
    config,
    context: Stream,
    **_,
) -> Tensor:
    """After `functools.partial`, Megatron's `output_processor`: (names, n) fp32, the `token_statistics` of
    each wanted token."""
    hidden_ND = _wanted(hidden_states, config, context)
    weight = output_layer.weight if output_weight is None else output_weight
    statistics = token_statistics(
        hidden_ND, weight, context.labels, config.vocab_size, names, temperature, config.logit_softcap
    )
    return torch.stack(statistics)


def output_logits(
    *, hidden_states: Tensor, output_layer, output_weight, config, context: Stream, **_
) -> Tensor:
    """Megatron's `output_processor`: the logits (n, V) of the wanted tokens, on all tensor-parallel ranks."""
    assert not torch.is_grad_enabled(), "tied weights take no gradient of these, see gradient_of"
    hidden_ND = _wanted(hidden_states, config, context)
    weight = output_layer.weight if output_weight is None else output_weight
    logits = hidden_ND @ weight.t()
    if config.tensor_model_parallel_size > 1:
        logits = gather_from_tensor_model_parallel_region(logits)[:, : config.vocab_size]
    return capped(logits, config.logit_softcap)


def of_all_context_ranks(local: Tensor, stream: Stream, dim: int) -> Tensor:
    """The outputs of all wanted tokens of a stream along `dim`; this rank has `local`. Zeros stand for a
    wanted token that is padding.

    Every context-parallel rank must then compute the same loss of them: the gradient of its own goes back.
    """
    shape = list(local.shape)
    shape[dim] = stream.outputs
    placed = local.new_zeros(shape).index_copy(dim, stream.output_places, local)
    # Megatron's name says tensor parallelism, but it sums over any group, and the gradient goes back as it is
    return reduce_from_tensor_model_parallel_region(placed, parallel_state.get_context_parallel_group())


def _wanted(hidden_T1D: Tensor, config, stream: Stream) -> Tensor:
    """(n, D) hidden states of the wanted tokens on every tensor-parallel rank; gradients are summed."""
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_T1D)[:, 0].index_select(0, stream.output_rows)
    hidden_ND = hidden_T1D[:, 0].index_select(0, stream.output_rows)
    return copy_to_tensor_model_parallel_region(hidden_ND) if torch.is_grad_enabled() else hidden_ND


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap)"""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def token_statistics(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    vocabulary: int,
    names: Sequence[str] = ("log_probs",),
    temperature: float = 1.0,
    softcap: float | None = None,
) -> list[Tensor]:
    """The statistics of each token in `names`, (N,) each; see `STATISTICS`.

    They are in fp32, or in a wider type of the hidden states. `weight_VD` is this tensor-parallel rank's
    part; rows beyond the first `vocabulary` of all ranks count for nothing. All ranks pass the same hidden
    states and labels and get the same result. Logits are `capped` and divided by `temperature`. All
    have gradients.
    """
    settings = (vocabulary, 1.0 / temperature, softcap)
    optional = ("entropies" in names, "mean_log_probs" in names)
    log_p_N, log_sum_N, entropy_N, mean_logit_N = _TokenStatistics.apply(
        hidden_ND, weight_VD, labels_N, settings, optional
    )
    statistics = {"log_probs": log_p_N, "logsumexp": log_sum_N, "entropies": entropy_N}
    if "mean_log_probs" in names:
        statistics["mean_log_probs"] = mean_logit_N - log_sum_N
    return [statistics[name] for name in names]


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, settings: tuple, optional: tuple[bool, bool]):
        vocabulary, scale, softcap = settings
        entropy, mean = optional
        group = parallel_state.get_tensor_model_parallel_group()
        first = group.rank() * len(weight_VD)
        held_N = (labels_N >= first) & (labels_N < first + len(weight_VD))
        column_N = torch.where(held_N, labels_N - first, 0)
        ctx.optional, ctx.vocabulary, ctx.settings = (
            optional,
            vocabulary,
            (scale, softcap, vocabulary - first),
        )
        is_kept = [True, True, *optional]
        numbers = hidden_ND.new_empty(sum(is_kept), len(hidden_ND), dtype=statistics_dtype(hidden_ND.dtype))
        product = None
        for rows in _chunks(hidden_ND, weight_VD):
            product = None  # frees the chunk before
            product = hidden_ND[rows] @ weight_VD.t()
            reduced = _reduced(product, column_N[rows], optional, ctx.settings)
            for number, values in zip(numbers, compress(reduced, is_kept), strict=True):
                number[rows] = values
        numbers[1] *= held_N
        log_sums_QN, labels_QN, *optional_QN = _gathered(numbers, group).unbind(1)
        log_sum_N = log_sums_QN.logsumexp(0)
        entropy_N = mean_N = None
        if entropy:  # a distribution of parts: the mean entropy inside a part and that of which part it is
            log_share_QN = log_sums_QN - log_sum_N
            entropy_N = (log_share_QN.exp() * (optional_QN[0] - log_share_QN)).sum(0)
        if mean:
            mean_N = optional_QN[-1].sum(0) / vocabulary
        ctx.save_for_backward(hidden_ND, weight_VD, column_N, held_N, log_sum_N, entropy_N)
        ctx.kept = product
        return labels_QN.sum(0) - log_sum_N, log_sum_N, entropy_N, mean_N

    @staticmethod
    def backward(ctx, grad_log_p_N, grad_log_sum_N, grad_entropy_N, grad_mean_N):
        hidden_ND, weight_VD, column_N, held_N, log_sum_N, entropy_N = ctx.saved_tensors
        entropy, mean = ctx.optional
        none_N = torch.zeros_like(log_sum_N)
        of_entropy = (entropy_N, grad_entropy_N) if entropy else (none_N, none_N)
        of_mean_N = grad_mean_N / ctx.vocabulary if mean else none_N
        of_tokens_6N = torch.stack(
            (log_sum_N, grad_log_sum_N - grad_log_p_N, grad_log_p_N * held_N, *of_entropy, of_mean_N)
        )
        grad_hidden_ND = torch.empty_like(hidden_ND)
        total_VD = sum_for(weight_VD) if ctx.needs_input_grad[1] else None
        product, ctx.kept = ctx.kept, None
        for rows in reversed(_chunks(hidden_ND, weight_VD)):
            if product is None:
                product = hidden_ND[rows] @ weight_VD.t()
            grad = _gradient(product, column_N[rows], of_tokens_6N[:, rows], ctx.optional, ctx.settings)
            product = None
            grad_hidden_ND[rows] = grad @ weight_VD
            if total_VD is not None:
                wgrad_gemm_accum_fp32(hidden_ND[rows], grad, total_VD)
            del grad  # before the next chunk is made
        grad_weight_VD = None if total_VD is None else gradient_of(weight_VD, total_VD)
        return grad_hidden_ND, grad_weight_VD, None, None, None


@Fused
def _reduced(product_NV: Tensor, column_N: Tensor, optional: tuple[bool, bool], settings: tuple) -> Tensor:
    """(4, n): the log of the sum of exponentials, the logit of a column, the entropy, the sum of the logits.

    The last two are zeros unless asked for. Compiled, it always has them, and multiplies by any scale: so
    one graph serves every loss.
    """
    entropy, mean = optional
    logits = _logits(product_NV, settings)
    log_sum_N = logits.logsumexp(-1)
    entropy_N = total_N = torch.zeros_like(log_sum_N)
    if torch.compiler.is_compiling() or entropy:
        log_p = logits - log_sum_N[:, None]
        entropy_N = -(log_p.exp() * log_p).sum(-1)
    if torch.compiler.is_compiling() or mean:
        total_N = _used(logits, settings).sum(-1)
    return torch.stack((log_sum_N, logits.gather(-1, column_N[:, None])[:, 0], entropy_N, total_N))


@Fused
def _gradient(
    product_NV: Tensor, column_N: Tensor, of_tokens_6N: Tensor, optional: tuple[bool, bool], settings: tuple
) -> Tensor:
    """The gradient of the product (n, V), which is overwritten: d log p(label) / d logits = 1[label] - p;
    d logsumexp / d logits = p; d entropy / d logits = -p (log p + entropy); d mean / d logits = 1 / V;
    d capped / d logits = 1 - (capped / softcap)²"""
    scale, softcap, _ = settings
    entropy, mean = optional
    log_sum_N1, grad_p_N1, grad_label_N1, entropy_N1, grad_entropy_N1, of_mean_N1 = of_tokens_6N[
        ..., None
    ].unbind()
    log_p = _logits(product_NV, settings)
    slope = None if softcap is None else (log_p / (scale * softcap)).square_().neg_().add_(1)
    log_p, factor = log_p.sub_(log_sum_N1), grad_p_N1
    if torch.compiler.is_compiling() or entropy:
        factor = factor - (log_p + entropy_N1) * grad_entropy_N1
    grad = log_p.exp_().mul_(factor)
    if torch.compiler.is_compiling():  # a scatter would write the rest in fp32 and read it again
        is_label = torch.arange(grad.shape[1], device=grad.device) == column_N[:, None]
        grad = grad + torch.where(is_label, grad_label_N1, 0)
    else:
        grad.scatter_add_(1, column_N[:, None], grad_label_N1)
    if torch.compiler.is_compiling() or mean:
        _used(grad, settings).add_(of_mean_N1)
    grad = grad if slope is None else grad.mul_(slope)
    grad = grad.mul_(scale) if torch.compiler.is_compiling() or scale != 1 else grad
    return grad.to(product_NV.dtype)


def _used(logits_NV: Tensor, settings: tuple[float, float | None, int]) -> Tensor:
    """The columns of tokens; the rest pads the weight."""
    return logits_NV[:, : max(settings[2], 0)]


def _logits(product_NV: Tensor, settings: tuple[float, float | None, int]) -> Tensor:
    """The product itself where nothing changes it. Rows of the weight after those that are `used` have a
    probability of zero."""
    scale, softcap, used = settings
    logits = capped(product_NV, softcap).to(statistics_dtype(product_NV.dtype))
    logits = logits * scale if torch.compiler.is_compiling() or scale != 1 else logits
    if used < logits.shape[1]:
        logits[:, max(used, 0) :] = NEVER
    return logits


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * len(weight_VD)))
    return [slice(start, start + size) for start in range(0, len(hidden_ND), size)]


def _gathered(local_3N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, 3, N)"""
    if group.size() == 1:
        return local_3N[None]
    every = local_3N.new_empty(group.size() * len(local_3N), local_3N.shape[1])
    dist.all_gather_into_tensor(every, local_3N, group=group)
    return every.unflatten(0, (group.size(), -1))
