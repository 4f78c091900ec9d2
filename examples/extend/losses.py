"""Three losses of tokens; docs/how-to/extend.md says what such a function gets.

megatron-vlm train … train.objective=examples/extend/losses.py:focal
"""

from torch import Tensor


def focal(log_probs: Tensor, weights: Tensor, gamma: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens that the model is sure of count less: arXiv 1708.02002 eq. 4."""
    cross_entropy = -weights * log_probs
    losses = (1 - log_probs.exp()) ** gamma * cross_entropy
    return losses.sum(), {"cross_entropy": cross_entropy.sum()}


def smoothed(log_probs: Tensor, mean_log_probs: Tensor, weights: Tensor, share: float = 0.1) -> Tensor:
    """Each label has 1 - share of the probability, and the vocabulary the rest: arXiv 1512.00567 sec. 7."""
    losses = -(1 - share) * log_probs - share * mean_log_probs
    return (weights * losses).sum()


def with_z_loss(
    log_probs: Tensor, logsumexp: Tensor, weights: Tensor, coefficient: float = 1e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keeps the normalizer of the softmax near 1: arXiv 2204.02311 sec. 5."""
    z_loss = (weights * logsumexp.square()).sum()
    return coefficient * z_loss - (weights * log_probs).sum(), {"z_loss": z_loss}
