"""The gated delta rule over a stream of documents, in chunks of tokens: exact, in plain PyTorch.

A head has a state S (K, V), zero where a document begins. Token t, of decay g <= 0 and strength b, makes

    S_t = e^g S_{t-1} + k_t u_t,    u_t = b (v_t - e^g k_t S_{t-1}),    o_t = q_t S_t

(Gated Delta Networks, arXiv 2412.06464). In a chunk of C tokens the u follow from one triangular system, and
from the state before the chunk. So only states go from chunk to chunk. A chunk may hold several documents:
pairs of tokens of different documents count as zero, and so does a state for the tokens of another document.

T tokens, N chunks, G heads of keys with R heads of values each, K and V their channels.

A state goes from token to token, so a document must be whole where it is computed. Where context parallelism
cuts one, each rank gets all of its tokens, for an equal part of the heads: one exchange before the layer's
convolution and one after its rule. Documents that are whole on a rank send nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from megatron_vlm.parallel.context import Piece
from megatron_vlm.parallel.setup import on_device

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
            for of_input, of_leaf in zip(gradients, of_leaves, strict=True):
                of_input[slab] = of_leaf
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


# --- documents on the ranks of context parallelism ----------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Whole documents, one after the other, of `lengths` on the host."""

    lengths: np.ndarray
    device: torch.device

    @cached_property
    def number(self) -> Tensor:
        """(T,) int32: the number of each token's document."""
        numbers = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        return on_device(numbers, self.device)

    @cached_property
    def place(self) -> Tensor:
        """(T,) int32: the place of each token in its document."""
        starts = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        return on_device((np.arange(len(starts)) - starts).astype(np.int32), self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """(documents + 1,) int32."""
        return on_device(np.concatenate(([0], self.lengths)).cumsum().astype(np.int32), self.device)

    @cached_property
    def chunks(self) -> Tensor:
        """(chunks, 2) int32: the document of each chunk, if none holds several, and its place in it."""
        counts = -(-self.lengths // CHUNK)
        document = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        return on_device(np.stack((document, place), 1).astype(np.int32), self.device)


@dataclass(frozen=True)
class CutDocuments:
    """Documents that several ranks share, and where their tokens are.

    rows     (n,) this rank's tokens of them
    others   (T - n,) its other tokens
    counts   the number of tokens that each rank has
    joined   (T,) where each of this rank's tokens is among `others`, then `rows`
    order    (M,) where each of their tokens is in what all ranks send, one rank after the other
    back     (M,) the inverse of `order`
    """

    documents: Documents
    rows: Tensor
    others: Tensor
    counts: list[int]
    joined: Tensor
    order: Tensor
    back: Tensor


@dataclass(frozen=True)
class Recurrence:
    """The tokens of a rank. `whole` are its documents that are not cut, and its padding as one more."""

    whole: Documents
    cut: CutDocuments | None


def recurrence(pieces: list[list[Piece]], rank: int, length: int, device: torch.device) -> Recurrence:
    """The recurrence of a rank. `pieces` are what each rank holds; `length` counts padding, too."""
    ranks_of: dict[int, set[int]] = {}
    for holder, rank_pieces in enumerate(pieces):
        for document, _, _ in rank_pieces:
            ranks_of.setdefault(document, set()).add(holder)
    shared = {document for document, ranks in ranks_of.items() if len(ranks) > 1}
    padding = length - sum(stop - start for _, start, stop in pieces[rank])
    lengths = [stop - start for document, start, stop in pieces[rank] if document not in shared]
    whole_documents = Documents(np.array([*lengths, *[padding] * bool(padding)], np.int64), device)
    if not shared:
        return Recurrence(whole_documents, None)
    is_cut = [
        # a rank may hold nothing: of no list numpy would make numbers
        np.repeat(
            np.array([d in shared for d, _, _ in rank_pieces], bool), [b - a for _, a, b in rank_pieces]
        )
        for rank_pieces in pieces
    ]
    # (document, place) of each token in what all ranks send
    sent = [
        np.stack((np.full(stop - start, document), np.arange(start, stop)))
        for rank_pieces in pieces
        for document, start, stop in rank_pieces
        if document in shared
    ]
    documents, places = np.concatenate(sent, axis=1)
    order = np.lexsort((places, documents))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    is_here = np.pad(is_cut[rank], (0, padding))
    rows = np.flatnonzero(is_here)
    uncut = np.flatnonzero(~is_here)
    cut = CutDocuments(
        documents=Documents(np.unique(documents, return_counts=True)[1], device),
        rows=on_device(rows, device),
        others=on_device(uncut, device),
        counts=[int(tokens.sum()) for tokens in is_cut],
        joined=on_device(np.argsort(np.concatenate((uncut, rows))), device),
        order=on_device(order, device),
        back=on_device(back, device),
    )
    return Recurrence(whole_documents, cut)
