"""The choice of the next token, and its log-probabilities."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.parallel.setup import on_device

NUMBERS_AT_ONCE = 2**24  # of logits whose probabilities are held


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: temperature 0 takes the likeliest; else one of the smallest set of likeliest
    tokens that has a probability of `top_p`, after logits are divided by `temperature`."""

    temperature: float
    top_p: float
    seed: int

    def draws(self, prompt: int, answer: int, steps: int) -> np.ndarray:
        """(steps,) numbers of [0, 1) for one answer, whatever else is generated and wherever."""
        if not self.temperature:
            return np.zeros(steps)
        return np.random.default_rng([self.seed, prompt, answer]).random(steps)

    def choose(self, logits_BV: Tensor, draws_B: np.ndarray) -> Tensor:
        """(3, B) fp64: the token, and the logarithms of the probability with which it was chosen and of its
        probability at temperature 1 among all tokens."""
        at_once = max(1, NUMBERS_AT_ONCE // logits_BV.shape[1])
        parts = zip(logits_BV.split(at_once), torch.from_numpy(draws_B).split(at_once), strict=True)
        return torch.cat([self._choose(logits.float(), draws) for logits, draws in parts], dim=1)

    def _choose(self, logits_BV: Tensor, draws_B: Tensor) -> Tensor:
        if not self.temperature:
            token_R1 = logits_BV.argmax(-1, keepdim=True)
            chosen_R1 = torch.zeros_like(token_R1)
        else:
            token_R1, chosen_R1 = self._draw(logits_BV, draws_B)
        plain_R1 = logits_BV.gather(1, token_R1) - logits_BV.logsumexp(-1, keepdim=True)
        return torch.cat([x.double() for x in (token_R1, chosen_R1, plain_R1)], dim=1).t()

    def _draw(self, logits_BV: Tensor, draws_B: Tensor) -> tuple[Tensor, Tensor]:
        """Draws by the inverse of the cumulative distribution. In the order of token ids, logits that differ
        by rounding between layouts move its steps by no more than that."""
        log_p_BV = (logits_BV / self.temperature).log_softmax(-1)
        p_RV = log_p_BV.double().exp()
        if self.top_p < 1:
            sorted_RV = p_RV.sort(dim=-1, descending=True).values
            before_BV = _cumsum(sorted_RV) - sorted_RV
            kept_R1 = (before_BV < self.top_p).sum(-1, keepdim=True)
            p_RV = p_RV.where(p_RV >= sorted_RV.gather(1, kept_R1 - 1), 0)
        sums_RV = _cumsum(p_RV)
        total_R1 = sums_RV[:, -1:]
        # below the total also when it is rounded
        draw_R1 = on_device(draws_B[:, None], p_RV.device) * (1 - 1e-12) * total_R1
        token_R1 = torch.searchsorted(sums_RV, draw_R1, right=True)
        chosen_R1 = log_p_BV.gather(1, token_R1)
        return token_R1, chosen_R1 if self.top_p == 1 else chosen_R1 - total_R1.log()


def _cumsum(p_RV: Tensor) -> Tensor:
    """In a deterministic run on the host: torch refuses it on CUDA, where it would not repeat."""
    if torch.are_deterministic_algorithms_enabled():
        return p_RV.cpu().cumsum(-1).to(p_RV.device)
    return p_RV.cumsum(-1)
