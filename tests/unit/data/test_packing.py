"""Packing and balance as algorithms: full rows, both budgets, nothing lost, steps alike over ranks."""

import numpy as np
import pytest

from megatron_vlm.data.encode.packing import attention_cost, balanced_order, pack, pack_buffer


def corpus(count, seed=0, capacity=4096):
    """(tokens, patches) of documents, of which 60 % have images."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(np.log(600), 0.9, count), 16, capacity).astype(int)
    share = np.where(rng.random(count) < 0.6, rng.uniform(0.3, 0.9, count), 0)
    return tokens, 4 * (tokens * share).astype(int)


def first_fit_decreasing(lengths, capacity):
    """The oracle: row sums, written as the name says."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fits = next((i for i, used in enumerate(rows) if used + length <= capacity), None)
        if fits is None:
            rows.append(length)
        else:
            rows[fits] += length
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_first_fit_decreasing(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.integers(10, 100), rng.integers(1, 400))
    rows = pack(lengths, 100)
    assert sorted(rows.sums(lengths).tolist()) == sorted(first_fit_decreasing(lengths.tolist(), 100))


@pytest.mark.parametrize("patch_capacity", [None, 16000, 9000])
def test_every_document_is_in_one_row_within_both_budgets(patch_capacity):
    lengths, patches = corpus(3000)
    keep = patches <= (patch_capacity or np.inf)
    lengths, patches = lengths[keep], patches[keep]
    rows = pack(lengths, 4096, patches, patch_capacity, np.random.default_rng(1))
    assert sorted(rows.documents.tolist()) == list(range(len(lengths)))
    assert rows.sums(lengths).max() <= 4096
    assert patch_capacity is None or rows.sums(patches).max() <= patch_capacity
    assert [len(row) for row in rows] == np.diff(rows.starts).tolist()


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_rows_are_full_with_all_lengths_known(capacity):
    lengths, _ = corpus(100_000, capacity=capacity)
    assert lengths.sum() / (len(pack(lengths, capacity)) * capacity) >= 0.999


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_rows_are_full_out_of_a_buffer_of_a_thousand(capacity):
    lengths, patches = corpus(50_000, capacity=capacity)
    buffers = [slice(start, start + 1000) for start in range(0, len(lengths), 1000)]
    rows = sum(len(pack_buffer(lengths[b].tolist(), capacity, patches[b].tolist(), None)) for b in buffers)
    assert lengths.sum() / (rows * capacity) >= 0.994


def test_rows_out_of_a_buffer_come_in_random_order():
    """First fit finds rows of long documents first."""
    lengths, patches = (costs.tolist() for costs in corpus(1000))
    longest = [
        max(lengths[document] for document in row) for row in pack_buffer(lengths, 4096, patches, None)
    ]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.2


@pytest.mark.parametrize(
    "budgets, message",
    [((99,), "document 1 has 100 tokens, over a row's 99"), ((100, [5, 7], 6), "document 1 has 7 patches")],
)
def test_a_document_over_a_budget_is_refused(budgets, message):
    with pytest.raises(ValueError, match=message):
        pack([10, 100], *budgets)


def straggler(costs, group=8):
    """Mean over steps of the greatest over the mean cost of the ranks."""
    steps = costs[: len(costs) // group * group].reshape(-1, group)
    steps = steps[steps.sum(1) > 0]
    return (steps.max(1) / steps.mean(1)).mean()


@pytest.fixture(scope="module")
def packed():
    """(tokens, attention, patches) of rows."""
    lengths, patches = corpus(100_000, capacity=8192)
    rows = pack(lengths, 8192, rng=np.random.default_rng(0))
    return rows.sums(lengths), attention_cost(rows, lengths), rows.sums(patches)


def test_rows_of_a_step_cost_about_the_same(packed):
    tokens, attention, patches = packed
    order = balanced_order(attention, patches, 8, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(len(tokens)))
    assert straggler(tokens[order]) <= 1.05
    assert straggler(patches[order]) <= 1.05
    assert straggler(attention[order]) <= 1.3
    shuffled = np.random.default_rng(0).permutation(len(tokens))
    assert straggler(patches[shuffled]) > 1.4 and straggler(attention[shuffled]) > 2


def test_steps_come_in_random_order(packed):
    _, attention, patches = packed
    order = balanced_order(attention, patches, 8, np.random.default_rng(0))
    steps = [costs[order][: len(order) // 8 * 8].reshape(-1, 8).mean(1) for costs in (attention, patches)]
    for costs in steps:
        assert abs(np.corrcoef(costs[:-1], costs[1:])[0, 1]) < 0.1
    other = balanced_order(attention, patches, 8, np.random.default_rng(1))
    assert (order == other).mean() < 0.01


def test_the_rows_that_complete_a_step_come_first(packed):
    _, attention, patches = packed
    order = balanced_order(attention, patches, 8, np.random.default_rng(0), unbalanced=3)
    assert sorted(order.tolist()) == list(range(len(patches)))
    assert straggler(patches[order][3:]) <= 1.05 < straggler(patches[order])
