"""Losses equal their published formulas, written out token by token, and so do their gradients."""

from __future__ import annotations

import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from torch import Tensor

from megatron_vlm.rl import losses

TOKENS = 40
QUICK = settings(max_examples=60, deadline=None)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*(shape or (TOKENS,)), generator=generator, dtype=torch.float64)


def log_probs(seed: int) -> Tensor:
    """Near each other, as those of a policy and its former self; ratios on both sides of every bound."""
    return -1 - numbers(0).abs() + numbers(seed, scale=0.5)


NEW, OLD, REFERENCE, ADVANTAGES = log_probs(1), log_probs(2), log_probs(3), numbers(4)
WEIGHTS = torch.where(numbers(5) > 1, 0.0, numbers(6).abs())
COUNTED = int((WEIGHTS != 0).sum())
PAIRS = [log_probs(seed) * 5 for seed in (7, 8, 9, 10)]


def by_token(formula, *columns: Tensor) -> float:
    """The weighted sum of `formula` over tokens, in Python's numbers."""
    rows = zip(WEIGHTS.tolist(), *(column.tolist() for column in columns), strict=True)
    return sum(weight * formula(*row) for weight, *row in rows)


def share(formula, *columns: Tensor) -> float:
    rows = zip(WEIGHTS.tolist(), *(column.tolist() for column in columns), strict=True)
    return sum(float(formula(*row)) for weight, *row in rows if weight) / COUNTED


def logged(loss: losses.Loss) -> dict[str, float]:
    assert all(entry.shape == (2,) and not entry.requires_grad for entry in loss.logs.values())
    return {name: (entry[0] / entry[1]).item() for name, entry in loss.logs.items()}


def surrogate(low: float, high: float, dual: float | None):
    def objective(new: float, old: float, advantage: float) -> float:
        ratio = math.exp(new - old)
        value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        return max(value, dual * advantage) if dual and advantage < 0 else value

    return objective


def test_policy_gradient():
    loss = losses.policy_gradient(NEW, ADVANTAGES, WEIGHTS)
    assert loss.total.item() == pytest.approx(by_token(lambda lp, a: -a * lp, NEW, ADVANTAGES), rel=1e-12)
    assert loss.logs == {}


@pytest.mark.parametrize(
    "low, high, dual", [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.4, 1.5), (0.3, 0.3, 3.0)]
)
def test_ppo_clip(low, high, dual):
    loss = losses.ppo_clip(NEW, OLD, ADVANTAGES, WEIGHTS, low, high, dual)
    high = low if high is None else high
    objective = surrogate(low, high, dual)
    columns = (NEW, OLD, ADVANTAGES)
    assert loss.total.item() == pytest.approx(by_token(lambda *row: -objective(*row), *columns), rel=1e-12)
    without_dual = surrogate(low, high, None)
    expected = {
        "ratio": share(lambda new, old: math.exp(new - old), NEW, OLD),
        "clip_share": share(lambda n, o, a: without_dual(n, o, a) < math.exp(n - o) * a, *columns),
        "old_kl": share(lambda new, old: math.exp(new - old) - 1 - (new - old), NEW, OLD),
        "dual_clip_share": share(lambda *row: objective(*row) > without_dual(*row), *columns),
    }
    if dual is None:
        del expected["dual_clip_share"]
    assert logged(loss) == pytest.approx(expected, rel=1e-6)
    assert all(0 < value < 1 for name, value in expected.items() if name.endswith("share")), expected


KL = {
    "k1": lambda new, ref: new - ref,
    "k2": lambda new, ref: (new - ref) ** 2 / 2,
    "k3": lambda new, ref: math.exp(ref - new) - 1 - (ref - new),
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_penalty(estimator):
    loss = losses.kl_penalty(NEW, REFERENCE, 0.3, WEIGHTS, estimator)
    expected = by_token(KL[estimator], NEW, REFERENCE)
    assert loss.total.item() == pytest.approx(0.3 * expected, rel=1e-12)
    assert logged(loss) == pytest.approx({"kl": share(KL[estimator], NEW, REFERENCE)}, rel=1e-6)


@pytest.mark.parametrize("estimator", KL)
def test_kl_estimators_in_the_mean_over_a_vocabulary(estimator):
    """Each token of the vocabulary as often as the policy samples it: means and gradients without noise."""
    logits, reference = numbers(1, 11).requires_grad_(), numbers(2, 11).log_softmax(0)
    log_p = logits.log_softmax(0)
    kl = (log_p.exp() * (log_p - reference)).sum()
    other_kl = (reference.exp() * (reference - log_p)).sum()
    (kl_grad,), (other_grad,) = (torch.autograd.grad(x, logits, retain_graph=True) for x in (kl, other_kl))
    loss = losses.kl_penalty(log_p, reference, 1.0, log_p.exp(), estimator)
    (grad,) = torch.autograd.grad(loss.total, logits)
    expected = {"k1": torch.zeros_like(kl_grad), "k2": kl_grad, "k3": other_grad}[estimator]
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-14)
    assert (loss.total.item() == pytest.approx(kl.item(), rel=1e-12)) == (estimator != "k2")


def test_entropy_bonus():
    entropies = ADVANTAGES.abs()
    loss = losses.entropy_bonus(entropies, 0.01, WEIGHTS)
    assert loss.total.item() == pytest.approx(-0.01 * by_token(lambda h: h, entropies), rel=1e-12)
    assert logged(loss) == pytest.approx({"entropy": share(lambda h: h, entropies)}, rel=1e-6)


def test_dpo():
    rows = list(zip(*(column.tolist() for column in PAIRS), strict=True))
    margins = [0.2 * ((chosen - ref) - (rejected - other)) for chosen, rejected, ref, other in rows]
    loss = losses.dpo(*PAIRS, beta=0.2)
    assert loss.total.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins), rel=1e-12)
    expected = {"margin": statistics.mean(margins), "accuracy": statistics.mean(m > 0 for m in margins)}
    assert logged(loss) == pytest.approx(expected, rel=1e-5) and 0 < expected["accuracy"] < 1
    untrained = losses.dpo(*PAIRS[:2], *PAIRS[:2])
    assert untrained.total.item() == pytest.approx(TOKENS * math.log(2))


FUNCTIONS = {
    "policy_gradient": (lambda x: losses.policy_gradient(x, ADVANTAGES, WEIGHTS), NEW),
    "ppo_clip": (lambda x: losses.ppo_clip(x, OLD, ADVANTAGES, WEIGHTS, 0.2, 0.3, 1.5), NEW),
    **{k: (lambda x, k=k: losses.kl_penalty(x, REFERENCE, 0.3, WEIGHTS, k), NEW) for k in KL},
    "entropy_bonus": (lambda x: losses.entropy_bonus(x, 0.01, WEIGHTS), NEW),
    "dpo, chosen": (lambda x: losses.dpo(x, *PAIRS[1:]), PAIRS[0]),
    "dpo, rejected": (lambda x: losses.dpo(PAIRS[0], x, *PAIRS[2:]), PAIRS[1]),
    "sum of two": (
        lambda x: losses.ppo_clip(x, OLD, ADVANTAGES) + losses.kl_penalty(x, REFERENCE, 0.1),
        NEW,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name):
    function, argument = FUNCTIONS[name]
    argument = argument.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x).total, argument)
    (grad,) = torch.autograd.grad(function(argument).total, argument)
    assert grad.abs().max() > 0


def test_only_the_policy_is_trained():
    others = [x.clone().requires_grad_() for x in (OLD, REFERENCE, ADVANTAGES, WEIGHTS)]
    old, reference, advantages, weights = others
    new = NEW.clone().requires_grad_()
    total = (
        losses.policy_gradient(new, advantages, weights).total
        + losses.ppo_clip(new, old, advantages, weights).total
        + losses.kl_penalty(new, reference, 1.0, weights).total
        + losses.dpo(new, new + 1, reference, old).total
    )
    total.backward()
    assert new.grad is not None and all(x.grad is None for x in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_step_has_ratio_one_and_the_policy_gradient(dtype):
    new = NEW.to(dtype, copy=True).requires_grad_()
    advantages, weights = ADVANTAGES.to(dtype), WEIGHTS.to(dtype)
    loss = losses.ppo_clip(new, new.detach().clone(), advantages, weights, 0.2, 0.28, 3.0)
    assert loss.logs["ratio"].tolist() == [COUNTED, COUNTED]
    assert [loss.logs[name][0] for name in ("clip_share", "dual_clip_share", "old_kl")] == [0, 0, 0]
    (grad,) = torch.autograd.grad(loss.total, new)
    (expected,) = torch.autograd.grad(losses.policy_gradient(new, advantages, weights).total, new)
    assert torch.equal(grad, expected) and torch.equal(grad, -weights * advantages)


def all_terms(new, old, reference, advantages, entropies, weights) -> losses.Loss:
    return (
        losses.ppo_clip(new, old, advantages, weights, 0.2, 0.28, 3.0)
        + losses.kl_penalty(new, reference, 0.1, weights)
        + losses.entropy_bonus(entropies, 0.01, weights)
        + losses.policy_gradient(new, advantages, weights)
    )


COLUMNS = (NEW, OLD, REFERENCE, ADVANTAGES, NEW.abs(), WEIGHTS)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_tokens_of_weight_zero_count_nowhere(garbage):
    """Whatever padding holds; the result is that of the other tokens alone, bit for bit up to their order."""
    counts = WEIGHTS != 0
    assert 0 < COUNTED < TOKENS
    filled = [torch.where(counts, column, garbage) for column in COLUMNS[:-1]]
    new = filled[0].requires_grad_()
    found = all_terms(*filled, WEIGHTS)
    found.total.backward()
    alone = [column[counts] for column in COLUMNS]
    expected = all_terms(*alone)
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-12)
    assert logged(found) == pytest.approx(logged(expected), rel=1e-6)
    assert new.grad.isfinite().all() and not new.grad[~counts].any() and new.grad[counts].all()


def test_nothing_is_read_on_the_host():
    """A tensor of the meta device has no values: reading one raises."""
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()
    columns = [column.float().to("meta").requires_grad_() for column in COLUMNS]
    loss = all_terms(*columns)
    loss.total.backward()
    losses.dpo(*columns[:4]).total.backward()
    groups = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    losses.document_sums(columns[0], groups, 3)
    losses.grpo_advantages(columns[3].detach(), groups)
    losses.dr_grpo_advantages(columns[3].detach(), groups)
    losses.grpo_weights([columns[0].detach() > 0])
    for estimator in KL:
        losses.kl_penalty(*columns[:2], 0.1, estimator=estimator)


@st.composite
def answers(draw) -> tuple[list[float], list[int]]:
    """Rewards and the prompts' numbers, any integers in any order; groups of one and of many."""
    group = st.sampled_from([-7, 0, 1, 2, 10**12])
    reward = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-100, 100)
    pairs = draw(st.lists(st.tuples(reward, group), min_size=1, max_size=20))
    return [reward for reward, _ in pairs], [group for _, group in pairs]


@QUICK
@given(answers(), st.randoms())
def test_advantages_are_those_of_each_group_alone(given_answers, random):
    rewards, groups = given_answers
    grpo, dr_grpo = losses.grpo_advantages(rewards, groups), losses.dr_grpo_advantages(rewards, groups)
    assert grpo.dtype == dr_grpo.dtype == torch.float32
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        centred = reward - statistics.fmean(others)
        deviation = statistics.stdev(others) if len(others) > 1 else 0.0
        assert dr_grpo[row].item() == pytest.approx(centred, rel=1e-6, abs=1e-9)
        assert grpo[row].item() == pytest.approx(centred / (deviation + 1e-6), rel=1e-5, abs=1e-5)
        if len(set(others)) == 1:
            assert grpo[row] == dr_grpo[row] == 0
    order = random.sample(range(len(rewards)), len(rewards))
    shuffled = losses.grpo_advantages([rewards[i] for i in order], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, grpo[order], rtol=1e-5, atol=1e-5)


def test_grpo_weights_make_means_of_documents():
    masks = [torch.ones(4), torch.tensor([0, 1, 1, 0, 1]).bool(), torch.zeros(3), torch.ones(1)]
    values = [numbers(seed, len(mask)) for seed, mask in enumerate(masks)]
    weights = losses.grpo_weights(masks)
    found = losses.policy_gradient(torch.cat(values), torch.ones(13), torch.cat(list(weights)))
    means = [
        value[mask.bool()].mean().item() for value, mask in zip(values, masks, strict=True) if mask.any()
    ]
    assert len(means) == 3 and found.total.item() == pytest.approx(-sum(means), rel=1e-6)


def test_the_examples_of_the_page_run():
    page = (ROOT / "docs" / "reference" / "policy.md").read_text()
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)  # these need a checkpoint
    code = [line[4:] for line in page.splitlines() if line.startswith("    ") or not line]
    assert sum(bool(line) for line in code) > 20
    exec("\n".join(code), {})


@pytest.mark.parametrize("advantages", [losses.grpo_advantages, losses.dr_grpo_advantages])
def test_a_reward_that_is_no_number_is_named(advantages):
    with pytest.raises(
        ValueError, match="rewards: that of sample 2 is nan, and so would be .* its whole group"
    ):
        advantages([1.0, 0.0, math.nan, math.inf], [0, 0, 1, 1])
