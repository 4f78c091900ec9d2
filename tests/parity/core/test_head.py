"""Statistics of tokens in chunks and over vocabulary shards equal those from whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from megatron_vlm.config import ParallelConfig
from megatron_vlm.models import head
from megatron_vlm.parallel import setup
from tiny.distributed import run_distributed

TOKENS, WIDTH, VOCABULARY = 37, 16, 63  # which two ranks cannot share equally


def given() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    return hidden.requires_grad_(), weight.requires_grad_(), labels, torch.randn(4, TOKENS)


def from_logits(temperature: float, names: list[str], softcap: float | None) -> list[torch.Tensor]:
    """Values and gradients in fp64 by torch's own functions."""
    hidden, weight, labels, factors = (x.detach().double() if x.is_floating_point() else x for x in given())
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    log_p = (logits / temperature).log_softmax(-1)
    statistics = {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "logsumexp": (logits / temperature).logsumexp(-1),
        "entropies": -(log_p.exp() * log_p).sum(-1),
        "mean_log_probs": log_p.mean(-1),
    }
    values = [statistics[name] for name in names]
    sum((value * f).sum() for value, f in zip(values, factors, strict=False)).backward()
    return [*values, hidden.grad, weight.grad]


def ours(chunk_bytes: int, temperature: float, names: list[str], softcap: float | None) -> list[torch.Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    setup.reset_layout(ParallelConfig(tp=size), 1)
    head.CHUNK_BYTES = chunk_bytes
    hidden, weight, labels, factors = given()
    padded = pad(weight.detach(), (0, 0, 0, -VOCABULARY % size), value=3.0)
    part = padded.chunk(size)[rank].clone().requires_grad_()
    values = head.token_statistics(hidden, part, labels, VOCABULARY, names, temperature, softcap)
    sum((value * f).sum() for value, f in zip(values, factors, strict=False)).backward()
    dist.all_reduce(hidden.grad)  # which the gather before the head does in the model
    parts = [torch.empty_like(part.grad) for _ in range(size)]
    dist.all_gather(parts, part.grad)
    gradient, of_padding = torch.cat(parts).tensor_split([VOCABULARY])
    assert of_padding.shape == (len(padded) - VOCABULARY, WIDTH) and not of_padding.any()
    return [*(value.detach() for value in values), hidden.grad, gradient]


CASES = [
    (chunk_tokens * 4 * VOCABULARY, temperature, names, softcap)
    for chunk_tokens in (1000, 10, 1)
    for temperature in (1.0, 0.7)
    for names in (["log_probs"], ["log_probs", "entropies"], ["mean_log_probs"], [*head.STATISTICS])
    for softcap in (None, 5.0)
]


def on_ranks() -> list:
    setup.init_distributed(ParallelConfig(), 1)
    return [ours(*case) for case in CASES]


def in_one_process() -> dict[str, Any]:
    """Everything that this file measures in one process, by name."""
    measured = {"cases": on_ranks(), "is differential": finite_differences()}
    measured |= {"added to the buffer": in_megatrons_buffer(), "no token": no_token()}
    return measured | {"memory": memory_of_a_step()}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return run_distributed(1, in_one_process)[0]


def check_cases(results: list) -> None:
    for (_, temperature, names, softcap), found in zip(CASES, results, strict=True):
        expected = from_logits(temperature, names, softcap)
        assert len(found) == len(expected) == 2 + len(names)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_values_and_gradients_are_those_from_logits(measured):
    check_cases(measured["cases"])


@pytest.mark.long
def test_ranks_that_share_a_vocabulary_have_the_same():
    for results in run_distributed(2, on_ranks):
        check_cases(results)


def finite_differences() -> bool:
    head.CHUNK_BYTES = 3 * 4 * 11  # three tokens: several chunks
    numbers = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 5, generator=numbers, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=numbers, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (7,), generator=numbers)

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack(head.token_statistics(hidden, weight, labels, 11, head.STATISTICS, 0.7))

    return torch.autograd.gradcheck(scores, (hidden, weight), atol=1e-8, rtol=1e-6)


def test_gradients_of_all_statistics_are_finite_differences(measured):
    """In fp64."""
    assert measured["is differential"]


# ---- the gradient of the weight --------------------------------------------------------------------------


def in_megatrons_buffer() -> dict[str, tuple[torch.Tensor, ...]]:
    """By dtype: the buffer's change with all tokens in a chunk, and with one in each. The second weight is
    the embedding, too, whose backward pass gives autograd what it wants."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, labels, factors = given()
        hidden, weight = hidden.detach().to(dtype), torch.nn.Parameter(weight.detach().to(dtype))
        changes, before = [], torch.full(weight.shape, 0.5)
        for tokens in (TOKENS, 1):
            head.CHUNK_BYTES = tokens * 4 * VOCABULARY
            weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
            weight.is_embedded, weight.grad = tokens == 1, None
            (head.token_statistics(hidden, weight, labels, VOCABULARY)[0] * factors[0]).sum().backward()
            assert weight.grad_added_to_main_grad and (weight.grad is None) == weight.is_embedded
            changes.append(weight.main_grad - before)
        found[str(dtype)] = tuple(changes)
    return found


def test_the_gradient_of_the_weight_is_added_to_megatrons_buffer_unrounded(measured):
    found = measured["added to the buffer"]
    expected = from_logits(1.0, ["log_probs"], None)[-1]
    for dtype, error in (("torch.float32", 1e-5), ("torch.bfloat16", 1e-2)):  # weights are rounded, too
        at_once, one_by_one = found[dtype]
        assert (at_once - expected).abs().max() <= error * expected.abs().max(), dtype
        # in 16 bits the sums would differ by 4e-3
        assert (at_once - one_by_one).abs().max() <= 1e-6 * expected.abs().max(), dtype


def no_token() -> tuple[int, int]:
    hidden, weight, labels, _ = given()
    [log_p] = head.token_statistics(hidden[:0], weight, labels[:0], VOCABULARY)
    log_p.sum().backward()
    return len(log_p), weight.grad.count_nonzero().item()


def test_without_a_wanted_token_gradients_are_zero(measured):
    assert measured["no token"] == (0, 0)


def memory_of_a_step() -> tuple[int, int]:
    """Peak bytes of forward and backward, and those of a chunk."""
    from megatron_vlm.extras.plan.recorder import TensorMemory

    tokens, trained, vocabulary = 4096, 400, 262_144
    head.CHUNK_BYTES = 2**26
    hidden, weight = (
        torch.randn(tokens, 8, requires_grad=True),
        torch.randn(vocabulary, 8, requires_grad=True),
    )
    labels = torch.randint(0, vocabulary, (trained,))
    with TensorMemory() as memory:
        head.token_statistics(hidden[:trained], weight, labels, vocabulary)[0].sum().backward()
    return memory.peak, head.CHUNK_BYTES


def test_a_step_never_holds_the_logits_of_a_row(measured):
    """The logits of the 4096 tokens would be 64 chunks, those of the 400 trained ones 6.25."""
    peak, chunk = measured["memory"]
    assert peak < 1.6 * chunk  # besides it, gradients of the weights


# ---- its operations ---------------------------------------------------------------------------------------

TOKENS_8B, WIDTH_8B, VOCABULARY_8B = 8192, 4096, 151_936  # Qwen3-VL-8B's


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "names": head.STATISTICS}, {"softcap": 30.0}], ids=str
)
def test_the_logits_of_the_last_chunk_are_not_computed_again(settings, buffer):
    """Forward, backward for hidden states and weight, and logits again: four products for other chunks."""
    hidden, weight = (
        torch.empty(rows, WIDTH_8B, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for rows in (TOKENS_8B, VOCABULARY_8B)
    )
    if buffer:
        weight.main_grad = torch.empty_like(weight, dtype=torch.float32)
    labels = torch.empty(TOKENS_8B, dtype=torch.long, device="meta")
    in_place = {torch.ops.aten.addmm_: addmm_flop}
    with (
        setup.pretend_rank(ParallelConfig(), 1),
        FlopCounterMode(display=False, custom_mapping=in_place) as counter,
    ):
        values = head.token_statistics(hidden, weight, labels, VOCABULARY_8B, **settings)
        sum(value.sum() for value in values).backward()
    product = 2 * TOKENS_8B * WIDTH_8B * VOCABULARY_8B
    assert 3.2 * product < counter.get_total_flops() < 4 * product
