"""Losses of reinforcement learning on log-probabilities, and the advantages and weights that they take.

Arguments with a number per token have one shape: (N,), the trained tokens of a micro batch in any order, or
any other. `weights` multiply the tokens' losses (None: all 1); a token of weight 0 counts nowhere, whatever
stands in the other arguments. Losses are sums: means over tokens, documents or a constant are a matter of
weights and of what the caller divides by, which only the whole step knows. No value is brought to the host.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_vlm.rl.containers import TensorList
from megatron_vlm.training.losses import Loss, check_same_shape, document_sums, logged
from megatron_vlm.training.losses import dpo as dpo

LARGEST_LOG_RATIO = 20.0  # so that exp of it is finite, as in verl's core_algos.py
SMALLEST_DEVIATION = 1e-6  # added to a group's standard deviation, as in verl's core_algos.py


def checked(result: object) -> Loss:
    """Returns what a loss function returned. Raises ValueError unless it is a `Loss` of the shapes above."""
    tensors = (
        {**result.logs, "total": result.total} if isinstance(result, Loss) else {type(result).__name__: None}
    )
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)}
    if shapes != {name: (2,) for name in tensors} | {"total": ()} or not result.total.requires_grad:
        raise ValueError(
            f"a loss function returned {', '.join(tensors)} of shapes {shapes}; return losses.Loss(total, "
            "logs): a total without axes, made of the log-probabilities, and logs of shape (2,), a sum and a "
            "count."
        )
    return result


def policy_gradient(log_probs: Tensor, advantages: Tensor, weights: Tensor | None = None) -> Loss:
    """-A log p: arXiv 1707.06347 eq. 2, with the opposite sign; on-policy only (REINFORCE)."""
    weights, log_probs, advantages = _counted(weights, log_probs=log_probs, advantages=advantages)
    return Loss(-(weights * advantages.detach() * log_probs).sum(), {})


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Loss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old: arXiv 1707.06347 eq. 7.

    `clip_high`, if given, differs from `clip_low` (clip-higher: arXiv 2503.14476 eq. 10). `dual_clip` > 1
    bounds the objective from below by dual_clip * A where A < 0 (arXiv 1912.09729 eq. 5). With equal
    log-probabilities r is exactly 1. Logs the mean `ratio`, `clip_share` (tokens whose objective the clip
    made smaller), `dual_clip_share`, and `old_kl`, KL(p_old || p) by k3.
    """
    high = clip_low if clip_high is None else clip_high
    if not (0 < clip_low < 1 and high > 0) or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(
            f"ppo_clip: clip_low {clip_low}, clip_high {clip_high}, dual_clip {dual_clip}; "
            "clip_low has to be between 0 and 1, clip_high above 0, dual_clip above 1 or None."
        )
    weights, log_probs, old_log_probs, advantages = _counted(
        weights, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    # the smaller objective of the two is pessimistic: it bounds how far a step may go
    advantages, log_ratio = advantages.detach(), _log_ratio(log_probs, old_log_probs.detach())
    ratio = log_ratio.exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + high) * advantages
    objective = torch.minimum(unclipped, clipped)
    logs = {"ratio": ratio, "clip_share": clipped < unclipped, "old_kl": ratio - 1 - log_ratio}
    if dual_clip is not None:
        # without it a large ratio makes a bad token's objective as low as it likes
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        logs["dual_clip_share"] = objective < floor
        objective = torch.maximum(objective, floor)
    return Loss(-(weights * objective).sum(), logged(weights, logs))


def kl_penalty(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    coefficient: float,
    weights: Tensor | None = None,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Loss:
    """coefficient * KL(p || p_reference), estimated on tokens sampled from p; logs `kl` without coefficient.

    With l = log p_reference - log p: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l (John Schulman, Approximating
    KL Divergence, joschu.net/blog/kl-approx.html). k1 and k3 have the right mean; k3 is GRPO's (arXiv
    2402.03300 eq. 4). The mean gradient of k2 alone is the gradient of KL(p || p_reference); k1's is zero,
    k3's is the gradient of KL(p_reference || p) (arXiv 2506.09477).
    """
    weights, log_probs, reference = _counted(weights, log_probs=log_probs, reference=reference_log_probs)
    # per token, of the tokens that were sampled
    log_ratio = _log_ratio(reference.detach(), log_probs)
    match estimator:
        case "k1":
            kl = -log_ratio
        case "k2":
            kl = log_ratio.square() / 2
        case "k3":
            kl = log_ratio.exp() - 1 - log_ratio
        case _:
            raise ValueError(f"kl_penalty: there is no estimator {estimator!r}; give k1, k2 or k3.")
    return Loss(coefficient * (weights * kl).sum(), logged(weights, {"kl": kl}))


def entropy_bonus(entropies: Tensor, coefficient: float, weights: Tensor | None = None) -> Loss:
    """-coefficient * entropy: arXiv 1707.06347 eq. 9, with the opposite sign; logs `entropy`."""
    weights, entropies = _counted(weights, entropies=entropies)
    return Loss(-coefficient * (weights * entropies).sum(), logged(weights, {"entropy": entropies}))


def grpo_advantages(rewards_B: Tensor | Sequence[float], groups_B: Tensor | Sequence[int]) -> Tensor:
    """(B,) fp32: (reward - mean) / standard deviation of the sample's group: arXiv 2402.03300 section 4.1.2.

    `groups_B` says which samples answer one prompt, by any integers. Equal rewards, and a group of one, give
    exactly 0. The deviation is that of a sample (n - 1), as in verl and TRL. Raises ValueError for a reward
    that is not finite. Rewards on a GPU are not looked at, as that waits for it: `Policy.forward_backward`
    then refuses the loss, and names the field and a sample of the group.
    """
    centred_B, numbers_B, counts_Y = _centred(rewards_B, groups_B)
    variances_Y = _group_sums(centred_B.square(), numbers_B) / (counts_Y - 1).clamp(min=1)
    return (centred_B / (variances_Y.sqrt() + SMALLEST_DEVIATION)[numbers_B]).float()


def dr_grpo_advantages(rewards_B: Tensor | Sequence[float], groups_B: Tensor | Sequence[int]) -> Tensor:
    """(B,) fp32: reward - mean of the sample's group, not divided: arXiv 2503.20783 section 3.2."""
    return _centred(rewards_B, groups_B)[0].float()


def grpo_weights(masks: Iterable[Tensor]) -> TensorList:
    """Weights that let each sample count as the mean of its tokens: arXiv 2402.03300 eq. 3 (1 / |o|).

    `masks` has for each sample (T,) what counts. A sample without such tokens has zeros.
    """
    return TensorList(mask.float() / mask.sum().clamp(min=1) for mask in masks)


def _centred(rewards_B, groups_B) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean in fp64, the group's number of each sample, the groups' sizes."""
    rewards_B, groups_B = torch.as_tensor(rewards_B, dtype=torch.float64), torch.as_tensor(groups_B)
    check_same_shape(rewards=rewards_B, groups=groups_B)
    if rewards_B.is_cpu and len(wrong := (~rewards_B.isfinite()).nonzero()):
        sample, reward = wrong[0].item(), rewards_B[wrong[0]].item()
        raise ValueError(
            f"rewards: that of sample {sample} is {reward}, and so would be the advantages of its whole "
            "group; give each sample a number."
        )
    order_B = groups_B.argsort()
    is_next_B = groups_B[order_B].diff(prepend=groups_B[order_B][:1]) != 0
    numbers_B = torch.empty_like(order_B).scatter(0, order_B, is_next_B.cumsum(0))
    lowest_Y = torch.zeros_like(rewards_B).scatter_reduce(0, numbers_B, rewards_B, "amin", include_self=False)
    above_B = rewards_B - lowest_Y[numbers_B]  # equal rewards are 0 now, whatever rounding does to their mean
    counts_Y = _group_sums(torch.ones_like(rewards_B), numbers_B)
    means_Y = _group_sums(above_B, numbers_B) / counts_Y.clamp(min=1)
    return above_B - means_Y[numbers_B], numbers_B, counts_Y


def _group_sums(values_B: Tensor, numbers_B: Tensor) -> Tensor:
    return document_sums(values_B, numbers_B, len(values_B))


def _counted(weights: Tensor | None, **values: Tensor) -> list[Tensor]:
    """The weights and the values, with 0 where the weight is 0: no infinity there can reach a gradient."""
    first = next(iter(values.values()))
    weights = torch.ones_like(first) if weights is None else weights
    check_same_shape(**values, weights=weights)
    return [weights.detach(), *(torch.where(weights != 0, value, 0) for value in values.values())]


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p - log_q).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
