"""Attention by segments equals attention with a mask over all pairs, on every rank of context parallelism."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import pairs
from places import ROOT

from megatron_vlm.config import ConfigError, DataConfig, ModelConfig, RunConfig, TrainConfig
from megatron_vlm.extras.plan.recorder import TensorMemory
from megatron_vlm.models.layers import attention_kernels as kernels
from megatron_vlm.models.layers import kernel_checks, tower_attention
from megatron_vlm.models.layers.attention import Attend, dense, mask
from megatron_vlm.models.layers.attention_kernels import KERNELS, Kernel, Segments
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement
from megatron_vlm.models.layers.fused import HeadSettings, turned_heads
from megatron_vlm.models.layers.kernel_checks import (
    attention_backends,
    check_towers,
    disagreement,
    layer_cases,
    tower_cases,
)
from megatron_vlm.models.layers.tower_attention import view_of
from megatron_vlm.validate import validate

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


def plans(
    lengths: list[int], blocks, ranks: int, windows, bidirectional: bool | str = True
) -> list[AttentionPlan]:
    placement = Placement(lengths, blocks, ranks, bidirectional)
    longest = max(map(len, placement.tokens)) + 3  # with padding
    return [AttentionPlan(placement, rank, longest, windows, CPU) for rank in range(ranks)]


def may_see(lengths, blocks, window, bidirectional) -> torch.Tensor:
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
            together = block[q] == block[k] > 0 and (window is not None or bidirectional != "windows")
            seen[q, k] = near and (k <= q or together) or (together and bidirectional == "whole")
    return torch.from_numpy(seen)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [True, "windows", "whole"])
def test_the_mask_is_the_rule(bidirectional, ranks, window):
    rng = np.random.default_rng(ranks)
    for _ in range(5):
        lengths = rng.integers(1, 30, rng.integers(1, 5)).tolist()
        blocks = blocks_of(lengths, rng)
        rule = may_see(lengths, blocks, window, bidirectional)
        for plan in plans(lengths, blocks, ranks, [window], bidirectional):
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
    drawn = blocks_of(lengths, rng)
    for blocks, bidirectional in (([], False), (drawn, True), (drawn, "whole")):
        for window in (None, 5, 600):
            for plan in plans(lengths, blocks, ranks, [window], bidirectional):
                view = plan.views[window]
                rows = np.zeros(plan.length, int)
                rows[: len(plan.places)] = plan.places
                keys = np.concatenate((rows, view.received))
                gradient = torch.randn(plan.length, h, width, dtype=torch.float64)
                found = []
                for backend in ("dense", "documents", "products"):
                    given = [x[i].clone().requires_grad_() for x, i in ((q, rows), (k, keys), (v, keys))]
                    if backend == "dense":
                        out = dense(*given, plan, view, 0.3)
                    else:
                        order = torch.arange(len(keys)) if view.order is None else view.order
                        ordered = [given[0], *(x.index_select(0, order) for x in given[1:])]
                        out = Attend.apply(*ordered, view, KERNELS[backend], 0.3)
                    # what padding sees differs between backends, and nothing depends on it
                    real = torch.arange(plan.length)[:, None, None] < len(plan.places)
                    (out * real).backward(gradient)
                    found.append([(out * real).detach(), *(x.grad for x in given)])
                for ours in found[1:]:
                    for mine, expected in zip(ours, found[0], strict=True):
                        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-10)


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
    sixteen = one = float("inf")
    began = time.monotonic()
    while time.monotonic() - began < 40:  # others may use the processor for a while
        sixteen, one = min(sixteen, attention_seconds([512] * 16)), min(one, attention_seconds([512]))
        if sixteen <= 1.5 * 16 * one:
            break
    assert sixteen <= 1.5 * 16 * one


def test_padding_is_cut_into_small_segments():
    plan = AttentionPlan(Placement([10], [], 1), 0, 1010, [None], CPU)
    assert plan.views[None].segments.query_lengths.tolist() == [10] + [128] * 7 + [104]


def flash_stand_in(q, k, v, *bounds_and_more, scale, window_size_left, window_size_right):
    """`aten._flash_attention_forward` by the kernel for a CPU."""
    cu_q, cu_k, *longest, dropout, is_causal, debug = bounds_and_more
    assert dropout == 0 and not debug and is_causal == ((window_size_left, window_size_right) == (-1, 0))
    lengths = [bounds.diff().numpy() for bounds in (cu_q, cu_k)]
    assert longest == [n.max() for n in lengths] and cu_q.dtype == cu_k.dtype == torch.int32
    window = (None if limit == -1 else limit for limit in (window_size_left, window_size_right))
    return *KERNELS["documents"].forward(q, k, v, Segments(*lengths, *window, CPU), scale), None, None, None


def flash_backward_stand_in(
    g, q, k, v, out, lse, cu_q, cu_k, *more, scale, window_size_left, window_size_right
):
    """`aten._flash_attention_backward`"""
    _, _, dropout, _, state, unused = more
    assert g.is_contiguous() and lse.is_contiguous() and dropout == 0 and len(unused) == 0 and len(state) == 2
    lengths = [bounds.diff().numpy() for bounds in (cu_q, cu_k)]
    window = (None if limit == -1 else limit for limit in (window_size_left, window_size_right))
    return KERNELS["documents"].backward(g, (q, k, v), (out, lse), Segments(*lengths, *window, CPU), scale)


def cudnn_segments(cu_q, cu_k, longest, is_causal) -> Segments:
    """The segments that cuDNN's arguments describe; for causal attention it takes one tensor of bounds."""
    assert cu_q is cu_k or not is_causal
    lengths = [bounds.diff().numpy() for bounds in (cu_q, cu_k)]
    planned.append((*map(len, lengths), *longest))
    assert all(limit >= n.max() for limit, n in zip(longest, lengths, strict=True))
    is_there = lengths[0] > 0
    return Segments(*(n[is_there] for n in lengths), None, 0 if is_causal else None, CPU)


planned: list[tuple[int, ...]] = []  # what cuDNN was called for


def cudnn_stand_in(q, k, v, bias, cu_q, cu_k, max_q, max_k, with_sum, dropout, is_causal, debug, *, scale):
    """`aten._cudnn_attention_forward`. What no segment has is not written."""
    assert bias is None and with_sum and dropout == 0 and not debug
    segments = cudnn_segments(cu_q, cu_k, (max_q, max_k), is_causal)
    n, m = cu_q[-1], cu_k[-1]
    context, log_sum = KERNELS["documents"].forward(q[:n], k[:m], v[:m], segments, scale)
    context = torch.cat((context, torch.full_like(q[n:], torch.nan)))
    log_sum = torch.cat((log_sum, log_sum.new_full((q.shape[1], len(q) - n), torch.nan)), dim=1)
    return context, log_sum, cu_q, cu_k, max_q, max_k, None, None, None


def cudnn_backward_stand_in(
    g, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, is_causal, *, scale
):
    """`aten._cudnn_attention_backward`"""
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and bias is None and dropout == 0
    segments = cudnn_segments(cu_q, cu_k, (max_q, max_k), is_causal)
    n, m = cu_q[-1], cu_k[-1]
    inputs, outputs = (q[:n], k[:m], v[:m]), (out[:n], lse[:, :n])
    found = KERNELS["documents"].backward(g[:n], inputs, outputs, segments, scale)
    pairs_of = zip(found, (q, k, v), strict=True)
    return tuple(torch.cat((grad, torch.full_like(x[len(grad) :], torch.nan))) for grad, x in pairs_of)


def flash4_segments(q, k, options) -> Segments:
    """The segments that FlashAttention 4's arguments describe."""
    bounds = options["cu_seqlens_q"], options["cu_seqlens_k"]
    lengths = [of.diff().numpy() for of in bounds]
    assert [options["max_seqlen_q"], options["max_seqlen_k"]] == [n.max() for n in lengths]
    assert [of[-1] for of in bounds] == [len(q), len(k)] and all(of.dtype == torch.int32 for of in bounds)
    return Segments(*lengths, options["window_size_left"], options["window_size_right"], CPU)


def flash4_stand_in(q, k, v, *, softmax_scale, return_lse, **options):
    """`flash_attn.cute.interface._flash_attn_fwd`, which returns more than torch's"""
    assert return_lse and len(options) == 6
    segments = flash4_segments(q, k, options)
    return *KERNELS["documents"].forward(q, k, v, segments, softmax_scale), None, None, None


def flash4_backward_stand_in(q, k, v, out, dout, lse, *, softmax_scale, deterministic, **options):
    """`flash_attn.cute.interface._flash_attn_bwd`"""
    assert dout.is_contiguous() and lse.shape == (q.shape[1], len(q)) and not deterministic
    segments = flash4_segments(q, k, options)
    return KERNELS["documents"].backward(dout, (q, k, v), (out, lse), segments, softmax_scale)


FLASH4 = {"_flash_attn_fwd": flash4_stand_in, "_flash_attn_bwd": flash4_backward_stand_in}
STAND_INS = {
    "flash_kernel": flash_stand_in,
    "flash_kernel_backward": flash_backward_stand_in,
    "cudnn_kernel": cudnn_stand_in,
    "cudnn_kernel_backward": cudnn_backward_stand_in,
}


@pytest.fixture
def with_stand_ins(monkeypatch):
    """Kernels that need a GPU are ones for a CPU, of the same signature."""
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(kernels, name, stand_in)
    monkeypatch.setattr(kernels, "NO_CUDNN", None)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(**FLASH4))
    return monkeypatch


@pytest.mark.parametrize("lengths", [[700, 3, 90, 1, 8], [509, 400]], ids=["uneven", "even"])
@pytest.mark.parametrize("name", ["flash", "cudnn", "flash4"])
@pytest.mark.parametrize("window", [None, 50])
def test_kernels_for_cuda_get_the_same_lists(with_stand_ins, name, window, lengths):
    planned.clear()
    q, k, v = (torch.randn(sum(lengths) + 3, n, 16, requires_grad=True) for n in (4, 2, 2))
    [plan] = plans(lengths, [(0, 5, 60), (1, 1, 3)], 1, [window])
    all_of_each = view_of(np.array([*lengths, 3]), CPU)  # as in a tower
    for view in (plan.views[window], all_of_each):
        found = []
        for kernel in (KERNELS["documents"], KERNELS[name]):
            out = Attend.apply(q, k, v, view, kernel, 0.3)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(map(torch.equal, *found))
    # in both views, forward and backward; a window goes to flash
    assert len(planned) == (len(lengths) == 2 and name == "cudnn") * (4 if window is None else 2)


def packed_rows(mean: float, spread: float, tokens: int = 8192) -> Iterator[list[int]]:
    """A thousand rows of log-normal documents; the largest of 200 that fits is taken."""
    rng = np.random.default_rng(0)
    drawn = iter(lambda: min(tokens, max(16, int(rng.lognormal(np.log(mean), spread)))), None)
    buffer = list(islice(drawn, 200))
    for _ in range(1000):
        row = []
        while fitting := [length for length in buffer if sum(row) + length <= tokens]:
            row.append(max(fitting) if row else buffer[0])
            buffer.remove(row[-1])
            buffer.append(next(drawn))
        yield row


@pytest.mark.parametrize(
    ("mean", "spread", "most"),
    [(600, 1.0, 8), (1500, 1.2, 6), (4000, 0.8, 7), (9000, 0.7, 7), (1000, 0.3, 8)],
)
def test_cudnn_makes_few_plans_and_holds_at_most_twice_what_flash_does(mean, spread, most):
    keys, heads = set(), (32, 128)
    for row in packed_rows(mean, spread):
        segments = Segments(np.array(row), np.array(row), None, 0, CPU)
        query = kernels._rounded(torch.empty(sum(row), *heads, device="meta"))
        shape = (query.shape, (sum(row), 8, 128), len(row))
        if segments.is_even:
            keys.add((*query.shape, *query.stride(), len(row), *segments.limits))
            flash = kernels.flash_workspace(*shape)
            assert kernels.cudnn_workspace(*shape, segments.limits) <= 2.05 * flash
    assert len(keys) == most


def test_workspaces_are_those_of_the_kernels_sources():
    """One document of 12k and 60 short ones, whose query heads share keys."""
    row = Segments(np.array([12000] + [346] * 60), np.array([12000] + [346] * 60), None, 0, CPU)
    tokens, heads = 32760, 32
    query, key = (tokens, heads, 128), (tokens, 8, 128)
    by_cudnn = kernels.cudnn_workspace(query, key, 61, row.limits)
    assert by_cudnn == 61 * 16384 * heads * (4 * 129 + 4 * 128) and round(by_cudnn / 2**30) == 31
    by_flash = kernels.flash_workspace(query, key, 61)
    assert by_flash == heads * ((tokens + 128 * 61) * 4 * 129 + tokens * 4 * 128)
    assert round(by_flash / 2**30, 1) == 1.1 and not row.is_even
    alone = (100, 4, 72)
    assert kernels.flash_workspace(alone, alone, 1) == 228 * 4 * 4 * 97  # 72 channels are padded to 96


def test_cudnn_gets_tensors_without_gaps(with_stand_ins):
    """Each way to lie in memory would be a plan of its own."""
    seen = []
    for name in ("cudnn_kernel", "cudnn_kernel_backward"):
        kernel = STAND_INS[name]
        with_stand_ins.setattr(
            kernels, name, lambda *given, kernel=kernel, **more: seen.append(given) or kernel(*given, **more)
        )
    q, k = torch.randn(512, 4, 16), torch.randn(512, 2, 16)
    inputs = [x.requires_grad_() for x in (q, k, torch.randn(512, 6, 16)[:, 4:])]
    Attend.apply(*inputs, view_of(np.array([512]), CPU), KERNELS["cudnn"], 0.3).sum().backward()
    tensors = [x for given in seen for x in given if isinstance(x, torch.Tensor)]
    assert len(seen) == 2 and all(x.is_contiguous() for x in tensors)


def test_two_passes_are_joined_in_fp32():
    """Of contexts in bf16, the sum by their shares is rounded once."""
    [plan] = plans([64], [(0, 0, 60)], 1, [None])
    q = torch.randn(plan.length, 2, 16).bfloat16()
    [(queries, keys, segments)] = plan.views[None].more
    passes = []

    def forward(*given):
        passes.append(documents.forward(*given))
        return tuple(x.clone() for x in passes[-1])

    documents = KERNELS["documents"]
    joined = Attend.apply(q, q, q, plan.views[None], Kernel(forward, documents.backward), 0.3)[queries]
    (first, first_sum), (other, other_sum) = passes
    sums = torch.stack((first_sum[:, queries], other_sum)).double().softmax(0).mT[..., None]
    expected = first[queries].double() * sums[0] + other.double() * sums[1]
    # half of the last of 8 bits, and what fp32 is off
    assert ((joined.double() - expected).abs() <= expected.abs() * 2**-8 * 1.001 + 1e-7).all()


def test_every_private_operator_is_compared():
    """What the package calls of `torch.ops.aten`, and of torch's functions that begin with an underscore."""
    known = {name.split(".")[0] for name in kernels.PRIVATE | kernels.CUDNN}
    used = set()
    for path in (ROOT / "src" / "megatron_vlm").rglob("*.py"):
        if path.name != "recorder.py":  # which only counts what others call
            used |= set(re.findall(r"\b(?:aten|torch)\.(_(?!dynamo|C\b)[a-z]\w+)", path.read_text("utf-8")))
    assert used == {name for name in known if name.startswith("_")}


def check(backend: str, dtype: torch.dtype = torch.float32) -> tuple[str | None, str | None]:
    """What is wrong in the language model, and in towers."""
    of_towers = disagreement(backend, (4, 4, 16), dtype, tower_cases(CPU))
    return disagreement(backend, (4, 2, 16), dtype, layer_cases({None, 50}, CPU)), of_towers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["documents", "products"])
def test_the_check_before_a_run_passes_what_agrees(name, dtype):
    assert check(name, dtype) == (None, None)


def test_products_hold_scores_of_a_run_of_queries_alone():
    """Of 4,096 tokens, forward and backward: scores of 512 at a time, at most four times in fp32."""
    q, k, v = (torch.randn(4096, n, 16, requires_grad=True) for n in (2, 1, 1))
    with TensorMemory() as memory:
        Attend.apply(
            q, k, v, plans([4093], [], 1, [None])[0].views[None], KERNELS["products"], 0.3
        ).sum().backward()
    assert memory.peak < 4.5 * 2 * 512 * 4096 * 4 < 2 * 4096**2 * 4


def test_the_check_before_a_run_names_what_does_not_run_or_differs(monkeypatch):
    assert all(problem.startswith("flash does not run here (") for problem in check("flash"))
    absent = "flash4 does not run here (flash-attn-4: ModuleNotFoundError: No module named 'flash_attn')"
    assert check("flash4") == (absent, absent)
    forward, backward = KERNELS["documents"]

    def wrong_gradient(*args):
        dq, dk, dv = backward(*args)
        return dq, dk * 1.001, dv

    monkeypatch.setitem(KERNELS, "documents", Kernel(forward, wrong_gradient))
    of_layers, of_towers = check("documents")
    assert of_towers == "documents differs by 1.0e-03 in its gradient 2"
    assert of_layers in (of_towers, f"{of_towers} in layers of window 50")  # of a set's first


@pytest.mark.parametrize("groups", [4, 2])
def test_the_check_gets_values_as_they_lie_in_a_step(groups):
    """As a view into the linear's output, whose rows have queries and keys, too."""
    rows = torch.randn(5, 1, (4 + 2 * groups) * 16)
    table = [torch.ones(5, 1, 1, 16)] * 2
    settings = HeadSettings(1e-6, False, False, False, False)
    _, _, value = turned_heads(rows.view(5, 1, groups, -1, 16), (None, None), [table], settings)
    seen = []
    inputs = kernel_checks._attention_inputs((4, groups, 16), 5, CPU, torch.float32)
    kernel_checks._with_gradients(inputs, lambda q, k, v: seen.append(v.stride()) or q + k.sum() + v.sum())
    assert seen == [value.squeeze(1).stride()] and not value.squeeze(1).is_contiguous()
    assert any(sum(lengths) % 128 for lengths in kernel_checks.DOCUMENTS)  # see `_rounded`


def test_a_kernel_that_breaks_the_device_ends_the_run_by_its_name(as_on_cuda):
    """After an illegal address, all that the device is asked for fails; so no other kernel is tried."""

    def break_device(*_):
        as_on_cuda.setattr(torch, "ones", fail)
        fail()

    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    as_on_cuda.setitem(KERNELS, "cudnn", Kernel(break_device, fail))
    with pytest.raises(
        ConfigError, match=r"^cudnn broke the device .*illegal.*; model.attention=flash trains"
    ):
        taken()


# -- which kernel a GPU takes


SIZES = SimpleNamespace(
    num_layers=2,
    layer_windows=(None, 50),
    layer_heads=(),
    kv_channels=16,
    num_attention_heads=4,
    num_query_groups=2,
    tensor_model_parallel_size=1,
    params_dtype=torch.bfloat16,
)
CUDA = torch.device("cuda")


@pytest.fixture
def as_on_cuda(with_stand_ins):
    """What is asked for on CUDA is done on the CPU, with short documents to measure."""
    with_stand_ins.setattr(kernel_checks, "AttentionPlan", lambda *given: AttentionPlan(*given[:-1], CPU))
    with_stand_ins.setattr(kernel_checks, "MEASURED", [40, 24])
    with_stand_ins.setattr(
        kernel_checks, "view_of", lambda lengths, _: view_of(np.minimum(lengths, 512), CPU)
    )
    with_stand_ins.setattr(torch.cuda, "synchronize", lambda: None)
    with_stand_ins.setattr(tower_attention, "kernels", {})
    with_stand_ins.setattr(kernel_checks, "kernels", tower_attention.kernels)
    with_stand_ins.setattr(kernel_checks, "chosen", {})
    with_stand_ins.setattr(kernel_checks, "from_all_ranks", lambda value, _: [value])
    with_stand_ins.setattr(
        kernel_checks.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None
    )
    return with_stand_ins


def slowed(name: str, clock) -> Kernel:
    """The kernel, which takes 0.4 s more on a clock that only this process moves, as others may be busy."""
    forward, backward = KERNELS[name]
    waits: list[float] = []
    clock.setattr(
        kernel_checks, "time", SimpleNamespace(perf_counter=lambda: time.process_time() + sum(waits))
    )
    return Kernel(lambda *given: waits.append(0.4) or forward(*given), backward)


def wrong(name: str) -> Kernel:
    forward, backward = KERNELS[name]
    return Kernel(forward, lambda *given: tuple(1.2 * x for x in backward(*given)))


def taken(**settings) -> dict[int, str]:
    return attention_backends(SIZES, ModelConfig(**settings), CUDA)


class Tower(torch.nn.Module):
    """As much of one as the check looks at."""

    head_dim, num_heads = 16, 4

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=tower_attention.NAME)


@pytest.mark.parametrize(
    ("slow", "fast"), [("flash", "cudnn"), pytest.param("cudnn", "flash", marks=pytest.mark.long)]
)
def test_the_faster_kernel_is_taken_or_the_one_that_is_named(as_on_cuda, recwarn, slow, fast):
    as_on_cuda.setitem(KERNELS, slow, slowed(slow, as_on_cuda))
    assert taken() == {16: fast}
    check_towers(Tower(), CUDA, torch.bfloat16, ModelConfig())
    assert tower_attention.kernels == {(4, 16): fast}
    kernel_checks.chosen.clear()  # as another process does
    assert taken(attention=slow) == {16: slow}
    check_towers(Tower(), CUDA, torch.bfloat16, ModelConfig(attention=slow))
    assert tower_attention.kernels == {(4, 16): slow} and not recwarn.list


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_heads_that_are_too_wide_for_kernels_have_products(as_on_cuda, recwarn, backend):
    sizes = SimpleNamespace(
        **vars(SIZES) | {"layer_heads": [(16, 2), (512, 2)], "layer_windows": (None, None)}
    )
    as_on_cuda.setitem(KERNELS, "cudnn", slowed("cudnn", as_on_cuda))
    backends = attention_backends(sizes, ModelConfig(attention=backend), CUDA)
    assert backends == {16: "flash", 512: "products"} and not recwarn.list


def test_flash_attention_4_is_measured_where_it_is_installed(as_on_cuda):
    slow = slowed("flash", as_on_cuda)
    for name in ("flash", "cudnn"):
        as_on_cuda.setitem(KERNELS, name, slow)
    for is_installed in (False, True):
        as_on_cuda.setattr(kernel_checks, "flash4_is_installed", lambda there=is_installed: there)
        assert (taken() == {16: "flash4"}) is is_installed
        check_towers(Tower(), CUDA, torch.bfloat16, ModelConfig())
        assert (tower_attention.kernels == {(4, 16): "flash4"}) is is_installed
        kernel_checks.chosen.clear()


def test_a_resumed_run_keeps_its_kernels(as_on_cuda):
    as_on_cuda.setitem(KERNELS, "flash", slowed("flash", as_on_cuda))
    kernel_checks.chosen |= {"attention, heads of 16": "flash", "towers, heads of 16": "flash"}
    assert taken() == {16: "flash"}
    check_towers(Tower(), CUDA, torch.bfloat16, ModelConfig())
    assert tower_attention.kernels == {(4, 16): "flash"}
    with pytest.warns(UserWarning, match="attention, heads of 16: flash so far, cudnn from here on"):
        assert taken(attention="cudnn") == {16: "cudnn"}


def test_a_deterministic_run_does_without_cudnn(as_on_cuda):
    as_on_cuda.setitem(KERNELS, "flash", slowed("flash", as_on_cuda))
    as_on_cuda.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert taken() == {16: "flash"}
    check_towers(Tower(), CUDA, torch.bfloat16, ModelConfig())
    assert tower_attention.kernels == {(4, 16): "flash"}
    model, train = ModelConfig(hf_path="x", attention="cudnn"), TrainConfig(deterministic=True)
    config = RunConfig(run_dir="x", model=model, train=train, data=DataConfig(train_data_path="x"))
    with pytest.raises(ConfigError, match="model.attention: cudnn adds in no fixed order"):
        validate(config)


def test_a_run_ends_if_no_kernel_agrees_unless_the_slower_way_is_named(as_on_cuda, recwarn):
    as_on_cuda.setitem(KERNELS, "flash", wrong("flash"))
    as_on_cuda.setattr(kernels, "NO_CUDNN", "torch has no cuDNN")
    said = r"flash differs by .+ in its gradient 1; cudnn does not run here \(torch has no cuDNN\)"
    with pytest.raises(
        ConfigError, match=said + r".+model.fallbacks=\[attention\] trains with dense"
    ) as ended:
        taken()
    assert "\n" not in str(ended.value)
    tower = Tower()
    with pytest.raises(ConfigError, match=r"towers, heads of 16: .+=\[attention,towers\] trains with Transf"):
        check_towers(tower, CUDA, torch.bfloat16, ModelConfig(fallbacks=["attention"]))
    assert not recwarn.list and tower.config._attn_implementation == tower_attention.NAME
    with pytest.warns(UserWarning, match="heads of 16: flash .+ The run goes on with dense attention:"):
        assert taken(fallbacks=["attention"]) == {16: "dense"}
    assert taken(attention="dense") == {16: "dense"}
