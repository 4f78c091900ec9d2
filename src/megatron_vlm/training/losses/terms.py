"""Terms of losses on log-probabilities, and DPO's; `rl.losses` has more of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


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
