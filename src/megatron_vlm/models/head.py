"""The output layer: loss, log-probability and entropy of the wanted tokens, without the logits of a row.

Hidden states of other tokens are dropped first. The rest goes through the output layer in chunks, and each
chunk's logits are reduced to a few numbers per token. The backward computes them again, except the
last chunk's, which are kept: so the most that is ever held is one chunk.
"""

from __future__ import annotations

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

from megatron_vlm.models.stream import Stream

CHUNK_BYTES = 2**28  # of the fp32 logits that are held at a time
NEVER = -1e9  # a logit whose probability is zero; finite, as 0 * inf is not a number


def output_losses(**given) -> Tensor:
    """Megatron's `output_processor`: the loss (n,) of each trained token, fp32."""
    return -output_scores(1.0, False, **given)[0]


@record_function("head")
def output_scores(
    temperature: float,
    entropy: bool,
    *,
    hidden_states: Tensor,
    output_layer,
    output_weight,
    config,
    context: Stream,
    **_,
) -> Tensor:
    """After `functools.partial` with the first two, Megatron's `output_processor`: (1 or 2, n) fp32, the
    log-probability of each wanted token and the entropy of its distribution, see `log_probabilities`."""
    hidden_ND = _wanted(hidden_states, config, context)
    weight = output_layer.weight if output_weight is None else output_weight
    found = log_probabilities(
        hidden_ND, weight, context.labels, config.vocab_size, temperature, entropy, config.logit_softcap
    )
    return torch.stack(found if entropy else found[:1])


def output_logits(
    *, hidden_states: Tensor, output_layer, output_weight, config, context: Stream, **_
) -> Tensor:
    """Megatron's `output_processor`: the logits (n, V) of the wanted tokens, on all tensor-parallel ranks."""
    hidden_ND = _wanted(hidden_states, config, context)
    weight = output_layer.weight if output_weight is None else output_weight
    logits = hidden_ND @ weight.t()
    if config.tensor_model_parallel_size > 1:
        logits = gather_from_tensor_model_parallel_region(logits)[:, : config.vocab_size]
    return capped(logits, config.logit_softcap)


def of_all_context_ranks(local: Tensor, stream: Stream, dim: int) -> Tensor:
    """The outputs of all of a stream's wanted tokens along `dim`, of which this rank has `local`; zeros where
    a wanted token is padding.

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


def log_probabilities(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    vocabulary: int,
    temperature: float = 1.0,
    entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The log-probability (N,) of each label and, if asked for, the entropy (N,) of each distribution.

    They are in fp32, or in a wider type of the hidden states. `weight_VD` is this tensor-parallel rank's
    part; rows beyond the first `vocabulary` of all ranks count for nothing. All ranks pass the same hidden
    states and labels and get the same result. Logits are `capped` and divided by `temperature`. Both
    have gradients.
    """
    return _LogProbabilities.apply(
        hidden_ND, weight_VD, labels_N, vocabulary, 1.0 / temperature, entropy, softcap
    )


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, vocabulary, scale, entropy: bool, softcap: float | None):
        group = parallel_state.get_tensor_model_parallel_group()
        first = group.rank() * len(weight_VD)
        how = scale, softcap, vocabulary - first
        held_N = (labels_N >= first) & (labels_N < first + len(weight_VD))
        column_N = torch.where(held_N, labels_N - first, 0)
        parts, logits = [], None
        for rows in _chunks(hidden_ND, weight_VD):
            logits = None  # frees the chunk before
            logits = _logits(hidden_ND[rows], weight_VD, *how)
            numbers = [logits.logsumexp(-1), logits.gather(-1, column_N[rows, None])[:, 0] * held_N[rows]]
            if entropy:
                log_p = logits.sub(numbers[0][:, None])
                numbers.append(-(log_p.exp() * log_p).sum(-1))
                del log_p
            parts.append(torch.stack(numbers))
        log_sums_QN, labels_QN, *entropies_QN = _gathered(torch.cat(parts, dim=1), group).unbind(1)
        log_sum_N = log_sums_QN.logsumexp(0)
        entropy_N = None
        if entropy:  # a distribution of parts: the mean entropy inside a part and that of which part it is
            log_share_QN = log_sums_QN - log_sum_N
            entropy_N = (log_share_QN.exp() * (entropies_QN[0] - log_share_QN)).sum(0)
        ctx.save_for_backward(hidden_ND, weight_VD, column_N, held_N, log_sum_N, entropy_N)
        ctx.how, ctx.kept = how, logits
        return labels_QN.sum(0) - log_sum_N, entropy_N

    @staticmethod
    def backward(ctx, grad_log_p_N, grad_entropy_N):
        """d log p(label) / d logits = 1[label] - p;  d entropy / d logits = -p (log p + entropy);
        d capped / d logits = 1 - (capped / softcap)²"""
        hidden_ND, weight_VD, column_N, held_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), None
        kept, ctx.kept = ctx.kept, None
        scale, softcap, _ = ctx.how
        for rows in reversed(_chunks(hidden_ND, weight_VD)):
            log_p = _logits(hidden_ND[rows], weight_VD, *ctx.how) if kept is None else kept
            slope = None if softcap is None else 1 - (log_p / (scale * softcap)).square_()
            kept, log_p = None, log_p.sub_(log_sum_N[rows, None])
            factor = -grad_log_p_N[rows, None]
            if entropy_N is not None:
                factor = factor - (log_p + entropy_N[rows, None]) * grad_entropy_N[rows, None]
            grad = log_p.exp_().mul_(factor)
            grad.scatter_add_(1, column_N[rows, None], (grad_log_p_N[rows] * held_N[rows])[:, None])
            grad = (grad if slope is None else grad.mul_(slope)).mul_(scale).to(weight_VD.dtype)
            grad_hidden_ND[rows] = grad @ weight_VD
            if ctx.needs_input_grad[1]:
                part_VD = grad.t() @ hidden_ND[rows]
                if grad_weight_VD is not None:
                    wide = torch.promote_types(part_VD.dtype, torch.float32)
                    part_VD = grad_weight_VD.to(wide).add_(part_VD)
                grad_weight_VD = part_VD
            del log_p, slope, factor, grad  # before the next chunk is made
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _logits(hidden_ND: Tensor, weight_VD: Tensor, scale: float, softcap: float | None, used: int) -> Tensor:
    """Rows of the weight after those that are `used` have a probability of zero."""
    logits = capped(hidden_ND @ weight_VD.t(), softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    if used < len(weight_VD):
        logits[:, max(used, 0) :] = NEVER
    return logits


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * len(weight_VD)))
    return [slice(start, start + size) for start in range(0, max(1, len(hidden_ND)), size)]


def _gathered(local_3N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks, 3, N)"""
    if group.size() == 1:
        return local_3N[None]
    every = local_3N.new_empty(group.size() * len(local_3N), local_3N.shape[1])
    dist.all_gather_into_tensor(every, local_3N, group=group)
    return every.unflatten(0, (group.size(), -1))
