"""The losses of a step: of trained tokens, and DPO's of preference pairs; `rl.losses` has losses of rewards.

A training step calls a `StepLoss`, which makes gradients and gives reports. With DPO the rows of a batch hold
pairs: document 1 of a row is a chosen answer and 2 the rejected one, then 3 and 4 (see `data.preferences`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vlm.batch import IGNORE_INDEX, Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.models.head import of_all_context_ranks
from megatron_vlm.models.stream import Stream
from megatron_vlm.models.vlm import in_evaluation, run_schedule, streams_of
from megatron_vlm.parallel.setup import on_device

Reports = list[dict[str, Tensor]]  # of micro batches on the last pipeline stage; elsewhere empty
# (chunks, micro batches, forward_only=False) -> (reports, the sum of their weights in the mean loss);
# unless forward_only, gradients of the sum of all losses are then in this rank's buffers
StepLoss = Callable[..., tuple[Reports, float]]


def token_objective(config: RunConfig, chunks: list[nn.Module]) -> StepLoss:
    """The loss of `objectives.TOKENS`, which needs neither."""
    return token_losses


def token_losses(
    chunks: list[nn.Module], micro_batches: list[Batch], forward_only: bool = False
) -> tuple[Reports, float]:
    """A `StepLoss`: the losses of the trained tokens, by their weights. Reports are `token_loss`'s."""
    streams = streams_of(chunks, micro_batches)
    reports = run_schedule(chunks, streams, token_loss, forward_only=forward_only)
    return reports, sum(stream.trained_weight for stream in streams)


def token_loss(stream: Stream, losses_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(weighted sum over trained tokens, report). A mean over them would make the loss a mean of means.

    The report's `sums` are the loss, the weights, the number of tokens; its weighted `losses` belong to the
    trained tokens at `places` of the micro batch.
    """
    losses_N = losses_N if stream.weights is None else losses_N * stream.weights
    total = losses_N.sum()
    count = torch.full_like(total, len(losses_N))
    weight = count if stream.weights is None else stream.weights.double().sum()
    sums = torch.stack([x.detach().double() for x in (total, weight, count)])
    return total, {"sums": sums, "losses": losses_N.detach(), "places": stream.output_places}


# -- terms of losses on log-probabilities


@dataclass(frozen=True)
class Loss:
    """A sum to be minimised, and what is to be logged.

    total  scalar with gradient
    logs   name -> (2,): a sum over the tokens that count, or pairs, and their number. Add these over micro
           batches and ranks, then divide.
    """

    total: Tensor
    logs: dict[str, Tensor]

    def __add__(self, other: Loss) -> Loss:
        """Both terms. Raises ValueError if they log the same name."""
        if both := sorted(self.logs.keys() & other.logs.keys()):
            raise ValueError(f"Loss: both terms log {', '.join(both)}; add each kind of term once.")
        return Loss(self.total + other.total, self.logs | other.logs)


def dpo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float = 0.1
) -> Loss:
    """-log sigmoid(beta * ((chosen - reference_chosen) - (rejected - reference_rejected))): arXiv 2305.18290
    eq. 7, summed over pairs.

    Each argument has a pair's log-probability of a whole answer, see `document_sums`. Logs `margin`, what the
    sigmoid is of, and `accuracy`, the share of pairs whose margin is positive.
    """
    references = {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    check_same_shape(chosen=chosen, rejected=rejected, **references)
    margin = beta * ((chosen - reference_chosen.detach()) - (rejected - reference_rejected.detach()))
    logs = {"margin": margin, "accuracy": margin > 0}
    return Loss(-F.logsigmoid(margin).sum(), logged(torch.ones_like(margin), logs))


def document_sums(values_N: Tensor, documents_N: Tensor, documents: int) -> Tensor:
    """(documents,) sums of the values of each document, which are numbered from 0."""
    return values_N.new_zeros(documents).index_add(0, documents_N, values_N)


def check_same_shape(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"losses: shapes differ: {shapes}; give one number for each token or sample.")


def logged(weights: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = (weights != 0).float()
    return {n: torch.stack([(counts * v.detach()).sum(), counts.sum()]).float() for n, v in values.items()}


# -- the model that a run began with


class StartingWeights:
    """A copy of the trained parameters of the chunks, which is little with adapters."""

    def __init__(self, chunks: list[nn.Module]):
        trained = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        self._start = [(param, param.detach().clone()) for param in trained]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The chunks have the starting weights meanwhile."""
        trained = [param.data for param, _ in self._start]
        for param, start in self._start:
            param.data = start
        try:
            yield
        finally:
            for (param, _), weights in zip(self._start, trained, strict=True):
                param.data = weights


# -- preference pairs


class Preferences:
    """A `StepLoss`: the mean DPO loss over the pairs of a global batch. Create it while `chunks` have the
    weights to compare with.

    Reports have `sums` (loss, pairs, trained tokens), `logs` as `dpo` and the mean rewards, and for figures
    by source the negative log-likelihood of each trained token in `losses`.
    """

    def __init__(self, config: RunConfig, chunks: list[nn.Module]):
        self._beta = config.train.dpo_beta
        self._start = StartingWeights(chunks)

    def __call__(
        self, chunks: list[nn.Module], micro_batches: list[Batch], forward_only: bool = False
    ) -> tuple[Reports, float]:
        """Reports on the last stage; the gradients are there unless `forward_only`."""
        streams, pairs = streams_of(chunks, micro_batches), [Pairs(batch) for batch in micro_batches]
        for stream, pair in zip(streams, pairs, strict=True):
            stream.trained_weight = pair.count
        with self._start.in_place(), in_evaluation(chunks), torch.no_grad():
            references = run_schedule(chunks, streams, partial(_scores, iter(pairs)), forward_only=True)
        loss = partial(_loss, self._beta, zip(pairs, references, strict=False))
        reports = run_schedule(chunks, streams, loss, forward_only=forward_only)
        return reports, sum(pair.count for pair in pairs)


class Pairs:
    """Which answer each trained token of a batch belongs to: `answers` (N,), 2 n for the chosen answer of
    pair n and 2 n + 1 for the rejected one; `count` pairs. A pair without trained tokens does not count."""

    def __init__(self, batch: Batch):
        rows, places = np.nonzero(batch["labels"].numpy() != IGNORE_INDEX)
        documents = batch["attention_mask"].numpy()[rows, places] - 1
        most_pairs = int(batch["attention_mask"].max()) // 2 + 1
        _, numbers = np.unique(rows * most_pairs + documents // 2, return_inverse=True)
        self.answers = 2 * numbers + documents % 2
        self.count = int(numbers.max(initial=-1)) + 1
        if (np.bincount(self.answers, minlength=2 * self.count) == 0).any():
            raise ValueError(f"dpo: rows of {batch['__key__']} hold answers that are no pairs.")


def _scores(pairs: Iterator[Pairs], stream: Stream, losses_N: Tensor) -> tuple[Tensor, Tensor]:
    return losses_N.sum(), _answer_scores(next(pairs), stream, losses_N)


def _loss(
    beta: float, pairs_and_references: Iterator[tuple[Pairs, Tensor]], stream: Stream, losses_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum over pairs and its report, like `token_loss`."""
    pair, reference = next(pairs_and_references)
    scores = _answer_scores(pair, stream, losses_N)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    reference_chosen, reference_rejected = reference.view(-1, 2).unbind(1)
    loss = dpo(chosen, rejected, reference_chosen, reference_rejected, beta)
    first = parallel_state.get_context_parallel_rank() == 0  # all of these ranks have the same pairs
    rewards = beta * (scores - reference).detach().view(-1, 2).sum(0)
    means = torch.stack((rewards, torch.full_like(rewards, pair.count)), 1)
    logs = loss.logs | {"reward_chosen": means[0], "reward_rejected": means[1]}
    total, tokens = loss.total.detach().double(), torch.full_like(loss.total, len(losses_N))
    report = {
        "sums": torch.stack([total * first, torch.full_like(total, pair.count * first), tokens.double()]),
        "logs": {name: value.double() * first for name, value in logs.items()},
        "losses": _weighted(stream, losses_N.detach()),
        "places": stream.output_places,
    }
    return loss.total.float(), report


def _answer_scores(pair: Pairs, stream: Stream, losses_N: Tensor) -> Tensor:
    """(2 pairs,) the log-probability of each answer, on every context-parallel rank; a token's is multiplied
    by its weight. In fp64, as a margin is the small difference of large sums."""
    answers = on_device(pair.answers, losses_N.device)
    log_probs = -of_all_context_ranks(_weighted(stream, losses_N), stream, dim=0)
    return document_sums(log_probs.double(), answers, 2 * pair.count)


def _weighted(stream: Stream, losses_N: Tensor) -> Tensor:
    return losses_N if stream.weights is None else losses_N * stream.weights
