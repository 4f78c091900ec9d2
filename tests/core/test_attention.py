"""Attention by segments equals attention with a mask over all pairs, on every rank of context parallelism."""

from __future__ import annotations

import inspect
import re
import time

import numpy as np
import pytest
import torch
from pairs import pairs

from megatron_vlm.models.layers.attention import Attend, dense, mask
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement
from megatron_vlm.models.layers.kernel_checks import disagreement, tower_disagreement
from megatron_vlm.models.layers.kernels import KERNELS, Kernel, Segments
from megatron_vlm.planning.tensor_memory import TensorMemory

CPU = torch.device("cpu")
DOCUMENTS = {
    "one token": [1],
    "short ones": [1, 2, 3, 1, 5],
    "long and short": [700, 3, 90, 1, 40],
    "one long": [1300],
}


def blocks_of(lengths: list[int], rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Up to three runs in each document that do not touch."""
    blocks = []
    for document, length in enumerate(lengths):
        edges = np.unique(rng.integers(0, length + 1, 6))[: 2 * (length // 2)]
        blocks += [(document, *edge) for edge in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=False)]
    return blocks


def plans(lengths: list[int], blocks, ranks: int, windows) -> list[AttentionPlan]:
    placement = Placement(lengths, blocks, ranks)
    longest = max(map(len, placement.tokens)) + 3  # with padding
    return [AttentionPlan(placement, rank, longest, windows, CPU) for rank in range(ranks)]


def may_see(lengths, blocks, window) -> torch.Tensor:
    """The rule, token by token."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum([0, *lengths])
    block = np.zeros(len(document), int)
    for number, (of, start, stop) in enumerate(blocks, 1):
        block[starts[of] + start : starts[of] + stop] = number
    seen = np.zeros((len(document), len(document)), bool)
    for q in range(len(document)):
        for k in range(starts[document[q]], starts[document[q] + 1]):
            near = window is None or q - k < window
            seen[q, k] = near and (k <= q or block[q] == block[k] > 0)
    return torch.from_numpy(seen)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mask_is_the_rule(ranks, window):
    rng = np.random.default_rng(ranks)
    for _ in range(5):
        lengths = rng.integers(1, 30, rng.integers(1, 5)).tolist()
        blocks = blocks_of(lengths, rng)
        rule = may_see(lengths, blocks, window)
        for plan in plans(lengths, blocks, ranks, [window]):
            held, view = len(plan.places), plan.views[window]
            ours = mask(plan, view)
            keys = np.concatenate((plan.places, view.received))
            real = torch.cat((ours[:held, :held], ours[:held, plan.length :]), 1)
            assert torch.equal(real, rule[plan.places][:, keys])
            # every key that a query sees is held or received
            assert torch.equal(real.sum(1), rule[plan.places].sum(1))
            assert not ours[:held, held : plan.length].any() and ours.any(1).all()


@pytest.mark.parametrize(
    ("name", "ranks", "h", "h_kv", "width"),
    list(pairs(list(DOCUMENTS), [1, 2, 4], [(4, 4, 16), (4, 2, 72), (6, 1, 128)])),
)
def test_documents_equal_the_mask_with_all_gradients(name, ranks, h, h_kv, width):
    lengths, rng = DOCUMENTS[name], np.random.default_rng(1)
    total = sum(lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(total, n, width, dtype=torch.float64) for n in (h, h_kv, h_kv))
    for blocks in ([], blocks_of(lengths, rng)):
        for window in (None, 5, 600):
            for plan in plans(lengths, blocks, ranks, [window]):
                view = plan.views[window]
                rows = np.zeros(plan.length, int)
                rows[: len(plan.places)] = plan.places
                keys = np.concatenate((rows, view.received))
                gradient = torch.randn(plan.length, h, width, dtype=torch.float64)
                found = []
                for backend in ("dense", "documents"):
                    given = [x[i].clone().requires_grad_() for x, i in ((q, rows), (k, keys), (v, keys))]
                    if backend == "dense":
                        out = dense(*given, plan, view, 0.3)
                    else:
                        order = torch.arange(len(keys)) if view.order is None else view.order
                        ordered = [given[0], *(x.index_select(0, order) for x in given[1:])]
                        out = Attend.apply(*ordered, view, KERNELS["documents"], 0.3)
                    # what padding sees differs between backends, and nothing depends on it
                    real = torch.arange(plan.length)[:, None, None] < len(plan.places)
                    (out * real).backward(gradient)
                    found.append([(out * real).detach(), *(x.grad for x in given)])
                for ours, expected in zip(found[1], found[0], strict=True):
                    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_rank_sends_is_what_the_other_waits_for(ranks):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.ceil(rng.lognormal(3, 1.2, rng.integers(1, 9))).astype(int).tolist()
        made = plans(lengths, blocks_of(lengths, rng), ranks, [None, 9])
        for window in (None, 9):
            views = [plan.views[window] for plan in made]
            if views[0].exchange is None:
                assert all(view.exchange is None and not len(view.received) for view in views)
                continue
            sent = []
            for plan, view in zip(made, views, strict=True):
                places = plan.places[view.exchange.rows.numpy()]
                sent.append(np.split(places, np.cumsum(view.exchange.sent)[:-1]))
            for rank, view in enumerate(views):
                arriving = [sent[other][rank] for other in range(ranks)]
                assert view.exchange.received == list(map(len, arriving))
                assert np.array_equal(np.concatenate(arriving), view.received)


def attention_seconds(lengths: list[int]) -> float:
    """The least of several forward and backward passes of 8 heads of 64."""
    plan = plans(lengths, [], 1, [None])[0]
    q, k, v = (torch.randn(plan.length, 8, 64, requires_grad=True) for _ in range(3))
    times = []
    for _ in range(5):
        start = time.process_time()
        Attend.apply(q, k, v, plan.views[None], KERNELS["documents"], 0.1).sum().backward()
        times.append(time.process_time() - start)
    return min(times)


def test_sixteen_documents_cost_sixteen_times_one():
    assert attention_seconds([512] * 16) <= 1.5 * 16 * attention_seconds([512])


@pytest.mark.parametrize("window", [None, 512])
def test_memory_grows_with_the_row_and_not_with_its_square(window):
    peaks = []
    for length in (8192, 16384):
        plan = plans([length], [(0, 100, 356)], 1, [window])[0]
        q, k, v = (torch.randn(plan.length, 2, 16, requires_grad=True) for _ in range(3))
        with TensorMemory() as memory:
            Attend.apply(q, k, v, plan.views[window], KERNELS["documents"], 0.1).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] < 2.1 * peaks[0]


def test_padding_is_cut_into_small_segments():
    plan = AttentionPlan(Placement([10], [], 1), 0, 1010, [None], CPU)
    assert plan.views[None].segments.query_lengths.tolist() == [10] + [128] * 7 + [104]


def of_lists(cu_q, cu_k, max_q, max_k, is_causal, window_size) -> Segments:
    """The segments that the arguments of torch's kernel describe."""
    lengths = [bounds.diff().numpy() for bounds in (cu_q, cu_k)]
    assert [max_q, max_k] == [n.max() for n in lengths] and cu_q.dtype == cu_k.dtype == torch.int32
    assert is_causal == (window_size == [-1, 0])
    return Segments(*lengths, *(None if limit == -1 else limit for limit in window_size), CPU)


def stand_in_forward(q, k, v, cu_q, cu_k, max_q, max_k, *, is_causal, scale, window_size, enable_gqa):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    segments = of_lists(cu_q, cu_k, max_q, max_k, is_causal, window_size)
    return *KERNELS["documents"].forward(q, k, v, segments, scale), None


def stand_in_backward(
    g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, *, is_causal, rng_state, scale, window_size
):
    assert g.is_contiguous() and lse.is_contiguous()
    segments = of_lists(cu_q, cu_k, max_q, max_k, is_causal, window_size)
    return KERNELS["documents"].backward(g, (q, k, v), (out, lse), segments, scale)


def test_varlen_gets_the_same_lists(monkeypatch):
    """The kernel needs a GPU. With one for a CPU in its place, what stands around it gives the same."""
    from torch.nn.attention import varlen

    lengths = [700, 3, 90, 1]
    q, k, v = (torch.randn(sum(lengths) + 3, n, 16, requires_grad=True) for n in (4, 2, 2))
    for mine, theirs in ((stand_in_forward, "_varlen_attn"), (stand_in_backward, "_varlen_attn_backward")):
        known = inspect.signature(getattr(varlen, theirs)._init_fn).parameters
        assert {n for n, p in inspect.signature(mine).parameters.items() if p.kind is p.KEYWORD_ONLY} <= set(
            known
        )
        assert len([p for p in known.values() if p.default is p.empty]) in (7, 12)
        monkeypatch.setattr(varlen, theirs, mine)
    for window in (None, 50):
        [plan] = plans(lengths, [(0, 5, 60), (2, 1, 30)], 1, [window])
        found = []
        for kernel in KERNELS.values():
            out = Attend.apply(q, k, v, plan.views[window], kernel, 0.3)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(map(torch.equal, *found))


def check(backend: str, dtype: torch.dtype = torch.float32) -> str | None:
    return disagreement(backend, (4, 2, 16), {None, 50}, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_before_a_run_passes_what_agrees(dtype):
    assert check("documents", dtype) is None
    assert tower_disagreement(4, 16, CPU, dtype) is None


def test_the_check_before_a_run_names_what_does_not_run_or_differs(monkeypatch):
    assert re.match(r"varlen does not run here \(.+\) in layers of window", check("varlen"))
    forward, backward = KERNELS["documents"]

    def wrong_gradient(*args):
        dq, dk, dv = backward(*args)
        return dq, dk * 1.001, dv

    monkeypatch.setitem(KERNELS, "documents", Kernel(forward, wrong_gradient))
    assert re.match(
        r"documents has a dk that differs by 1.0e-03 in layers of window (None|50)", check("documents")
    )
    assert tower_disagreement(4, 16, CPU, torch.float32) == "documents has a dk that differs by 1.0e-03"
