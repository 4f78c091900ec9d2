"""The gated delta rule over a stream of documents, in chunks of tokens: exact, in plain PyTorch.

A head has a state S (K, V), zero where a document begins. Token t, of decay g <= 0 and strength b, makes

    S_t = e^g S_{t-1} + k_t u_t,    u_t = b (v_t - e^g k_t S_{t-1}),    o_t = q_t S_t

(Gated Delta Networks, arXiv 2412.06464). In a chunk of C tokens the u follow from one triangular system, and
from the state before the chunk. So only states go from chunk to chunk. A chunk may hold several documents:
pairs of tokens of different documents count as zero, and so does a state for the tokens of another document.

T tokens, N chunks, G heads of keys with R heads of values each, K and V their channels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

CHUNK = 64
AT_ONCE = 2**24  # numbers of a value-like tensor that are computed at once
NO_DOCUMENT = -1


class Factors(NamedTuple):
    """The factors of all chunks. They follow from the inputs alone."""

    queries: Tensor  # (N, G, 1, C, K) of length K ** -0.5
    keys: Tensor  # (N, G, 1, C, K) of length 1
    values: Tensor  # (N, G, R, C, V)
    beta: Tensor  # (N, G, R, C, 1)
    enter: Tensor  # (N, G, R, C, 1) what is left at a token of the state before the chunk
    left: Tensor  # (N, G, R, C, C) what is left at a token (row) of an earlier one's u (column)
    seen: Tensor  # (N, G, R, C, C) the same in its output
    inverse: Tensor  # (N, G, R, C, C) of the triangular system


def _factors(inputs: Sequence[Tensor]) -> Factors:
    """The factors that follow from the inputs of the rule, in chunks.

    These are query, key, value, decay and beta (N, C, G, ...), the `document` (N, C) of each token, and the
    document of the token `before` each chunk (N,).
    """
    query, key, value, decay, beta, document, before = inputs
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = (_unit(x.to(wide)).transpose(1, 2)[:, :, None] for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    value, decay, beta = (x.to(wide).movedim(1, 3) for x in (value, decay, beta))
    eye = torch.eye(CHUNK, dtype=wide, device=decay.device)
    # in fp64: differences of sums of 64 decays in fp32 would have lost the digits that gradients need. As a
    # product, which CUDA repeats to the bit, unlike sums of its `cumsum`
    total = decay.double() @ torch.ones_like(eye, dtype=torch.float64).triu()
    document = document[:, None, None]
    pairs = (document[..., None] == document[..., None, :]).tril()
    decay_between = (total[..., None] - total[..., None, :]).masked_fill(~pairs, -torch.inf).to(wide).exp()
    enter = total.to(wide).exp() * (document == before[:, None, None, None])
    system = beta[..., None] * decay_between * (key @ key.mT)
    inverse = torch.linalg.solve_triangular(system, eye.expand_as(system), upper=False, unitriangular=True)
    return Factors(
        query,
        key,
        value,
        beta[..., None],
        enter[..., None],
        decay_between,
        decay_between * (query @ key.mT),
        inverse,
    )


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, as Transformers makes them (`l2norm`)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _updates(of: Factors, state: Tensor) -> Tensor:
    """The u (..., C, V) of all tokens, from the state (..., K, V) before the chunk."""
    return of.inverse @ (of.beta * (of.values - of.enter * (of.keys @ state)))


def _outputs(of: Factors, state: Tensor, updates: Tensor) -> Tensor:
    return of.enter * (of.queries @ state) + of.seen @ updates


def _after(of: Factors, state: Tensor, updates: Tensor, token: int = CHUNK - 1) -> Tensor:
    """The state (..., K, V) after this token of the chunk."""
    decayed = of.left[..., token, :, None] * updates
    return of.enter[..., token, :, None] * state + of.keys.mT @ decayed


def run(inputs: Sequence[Tensor], ends: Sequence[int] = ()) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The rule over a stream, from the inputs of `DeltaRule`: the outputs (T, G, R, V), the state before each
    chunk (N + 1, G, R, K, V) and that after each of the tokens `ends`, which ascend."""
    query = inputs[0]
    value = inputs[2]
    chunks = _chunked(inputs)
    wide = torch.promote_types(query.dtype, torch.float32)
    shape = len(chunks[0]) + 1, *value.shape[1:3], query.shape[-1], value.shape[-1]
    states = value.new_zeros(shape, dtype=wide)
    at_ends = []
    outputs = torch.empty_like(chunks[2])
    for slab in _slabs(value):
        of = _factors([x[slab] for x in chunks])
        updates = torch.empty_like(of.values)
        for number, update in enumerate(updates, slab.start):
            factors = Factors(*(x[number - slab.start] for x in of))
            update.copy_(_updates(factors, states[number]))
            states[number + 1] = _after(factors, states[number], update)
            tokens = [end % CHUNK for end in ends if end // CHUNK == number]
            at_ends += [_after(factors, states[number], update, token) for token in tokens]
        outputs[slab] = _outputs(of, states[:-1][slab], updates).movedim(3, 1)
    return outputs.flatten(0, 1)[: len(value)], states, at_ends


class DeltaRule(torch.autograd.Function):
    """The rule over a stream. It keeps its inputs and the state before each chunk; the backward pass computes
    the rest again, some chunks at once, from the last to the first.

    query, key (T, G, K) and value (T, G, R, V), decay and beta (T, G, R); `document` (T,) int, the number of
    each token's document, from 0. Returns (T, G, R, V) in the dtype of `value`.
    """

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        outputs, states, _ = run(inputs)
        ctx.save_for_backward(*inputs, states)
        return outputs

    @staticmethod
    def backward(ctx, gradient: Tensor):
        *inputs, states = ctx.saved_tensors
        chunks = _chunked(inputs)
        of_outputs = _in_chunks(gradient)
        gradients = [torch.empty_like(x) for x in chunks[:5]]
        of_state = torch.zeros_like(states[0])
        for slab in reversed(_slabs(gradient)):
            leaves = [x[slab].detach().requires_grad_() for x in chunks[:5]]
            with torch.enable_grad():
                of = _factors([*leaves, chunks[5][slab], chunks[6][slab]])
            of_outputs_here = of_outputs[slab].movedim(1, 3).to(of_state.dtype)
            of_states = torch.empty_like(states[:-1][slab])  # of those after each chunk
            for number in reversed(range(len(of_states))):
                of_states[number] = of_state
                factors = Factors(*(x.detach()[number] for x in of))
                of_state = _of_state(factors, of_state, of_outputs_here[number])
            with torch.enable_grad():
                updates = _updates(of, states[:-1][slab])
                outputs = _outputs(of, states[:-1][slab], updates)
                after = _after(of, states[:-1][slab], updates)
            of_leaves = torch.autograd.grad((outputs, after), leaves, (of_outputs_here, of_states))
            for whole, part in zip(gradients, of_leaves, strict=True):
                whole[slab] = part
        return *(x.flatten(0, 1)[: len(gradient)] for x in gradients), None


def _of_state(of: Factors, of_after: Tensor, of_outputs: Tensor) -> Tensor:
    """The gradient of the state before a chunk, from gradients of the state after it and of its outputs."""
    of_updates = of.seen.mT @ of_outputs + of.left[..., -1, :, None] * (of.keys @ of_after)
    of_read = of.enter * of.beta * (of.inverse.mT @ of_updates)
    through = of.enter[..., -1, :, None] * of_after - of.keys.mT @ of_read
    return through + of.queries.mT @ (of.enter * of_outputs)


@torch.no_grad()
def step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs (B, G, R, V) of the next token of B documents, whose `state` (B, G, R, K, V) it changes."""
    query, key = (_unit(x.to(state.dtype))[:, :, None, None] for x in (query, key))
    state *= decay.to(state.dtype).exp()[..., None, None]
    update = beta[..., None, None] * (value[..., None, :] - key @ state)
    state += key.mT @ update
    return (query * query.shape[-1] ** -0.5 @ state)[..., 0, :].to(value.dtype)


def _chunked(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of `DeltaRule` as `_factors` takes them."""
    *numbers, document = inputs
    document = _in_chunks(document, NO_DOCUMENT)
    before = pad(document[:-1, -1], (1, 0), value=NO_DOCUMENT)
    return [*map(_in_chunks, numbers), document, before]


def _in_chunks(x: Tensor, filling: float = 0.0) -> Tensor:
    """(T, ...) -> (N, C, ...), filled up."""
    missing = -len(x) % CHUNK
    x = pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=filling) if missing else x
    return x.unflatten(0, (len(x) // CHUNK, CHUNK))


def _slabs(value: Tensor) -> list[slice]:
    """The chunks that are computed at once."""
    size = max(1, AT_ONCE // (CHUNK * value.shape[1:].numel()))
    return [slice(first, first + size) for first in range(0, -(-len(value) // CHUNK), size)]


class Recomputed(torch.autograd.Function):
    """function(*tensors); only its inputs are kept for the backward pass."""

    @staticmethod
    def forward(ctx, function, *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.function(*leaves)
        trained = [x for x in leaves if x.requires_grad]
        of_trained = iter(torch.autograd.grad(result, trained, gradient))
        return None, *(next(of_trained) if x.requires_grad else None for x in leaves)


def convolved(x_TC: Tensor, weight_CW: Tensor, place_T: Tensor) -> Tensor:
    """silu of the causal convolution of each channel, over each document; `place` (T,) is a token's place in
    its document."""
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    wide_TC = x_TC.to(wide)
    weight_CW = weight_CW.to(wide)
    y_TC = wide_TC * weight_CW[:, -1]
    for back in range(1, weight_CW.shape[1]):
        earlier_TC = wide_TC[:-back] * (place_T[back:, None] >= back)
        y_TC[back:] = y_TC[back:] + earlier_TC * weight_CW[:, -1 - back]
    return silu(y_TC).to(x_TC.dtype)
