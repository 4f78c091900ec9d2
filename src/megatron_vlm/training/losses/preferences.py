"""The loss of `objectives.dpo`.

The rows of a batch hold pairs: document 1 of a row is a chosen answer and 2 the rejected one, then 3 and 4
(see `data.preferences`). A step scores them twice, by the starting weights and by those that are trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_vlm.batch import IGNORE_INDEX, Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.models.head import of_all_context_ranks
from megatron_vlm.models.schedule import in_evaluation, run_schedule, streams_of
from megatron_vlm.models.stream import Stream
from megatron_vlm.parallel.transfer import on_device
from megatron_vlm.training.losses.terms import document_sums, dpo
from megatron_vlm.training.losses.tokens import Reports


class Preferences:
    """A `StepLoss`: the mean DPO loss over the pairs of a global batch. Create it while `chunks` have the
    weights to compare with: it keeps a copy of what is trained, which is little with adapters.

    Reports have `sums` (loss, pairs, trained tokens), `logs` as `dpo` and the mean rewards, and for figures
    by source the negative log-likelihood of each trained token in `losses`.
    """

    def __init__(self, config: RunConfig, chunks: list[nn.Module]):
        trained = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]
        self._beta = config.train.dpo_beta
        self._start = [(param, param.detach().clone()) for param in trained]

    def __call__(
        self, chunks: list[nn.Module], micro_batches: list[Batch], forward_only: bool = False
    ) -> tuple[Reports, float]:
        """Reports on the last stage; the gradients are there unless `forward_only`."""
        streams, pairs = streams_of(chunks, micro_batches), [Pairs(batch) for batch in micro_batches]
        for stream, pair in zip(streams, pairs, strict=True):
            stream.trained_weight = pair.count
        with self._reference(), in_evaluation(chunks), torch.no_grad():
            references = run_schedule(chunks, streams, partial(_scores, iter(pairs)), forward_only=True)
        loss = partial(_loss, self._beta, zip(pairs, references, strict=False))
        reports = run_schedule(chunks, streams, loss, forward_only=forward_only)
        return reports, sum(pair.count for pair in pairs)

    @contextmanager
    def _reference(self) -> Iterator[None]:
        """Gives the chunks the starting weights meanwhile."""
        trained = [param.data for param, _ in self._start]
        for param, start in self._start:
            param.data = start
        try:
            yield
        finally:
            for (param, _), weights in zip(self._start, trained, strict=True):
                param.data = weights


class Pairs:
    """Which answer each trained token of a batch belongs to: `answers` (N,), 2 n for the chosen answer of
    pair n and 2 n + 1 for the rejected one; `count` pairs. A pair without trained tokens does not count."""

    def __init__(self, batch: Batch):
        rows, places = np.nonzero(batch["labels"].numpy() != IGNORE_INDEX)
        documents = batch["attention_mask"].numpy()[rows, places] - 1
        most = int(batch["attention_mask"].max()) // 2 + 1
        _, numbers = np.unique(rows * most + documents // 2, return_inverse=True)
        self.answers = 2 * numbers + documents % 2
        self.count = int(numbers.max(initial=-1)) + 1
        if (np.bincount(self.answers, minlength=2 * self.count) == 0).any():
            raise ValueError(f"dpo: rows of {batch['__key__']} hold answers that are no pairs.")


def _scores(pairs: Iterator[Pairs], stream: Stream, losses_N: Tensor) -> tuple[Tensor, Tensor]:
    return losses_N.sum(), _answer_scores(next(pairs), stream, losses_N)


def _loss(
    beta: float, pairs_and_references: Iterator[tuple[Pairs, Tensor]], stream: Stream, losses_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum over pairs and its report, like `tokens.token_loss`."""
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
