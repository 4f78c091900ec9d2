"""Every kernel for attention against dense attention in fp32, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from gpu_check.clock import both_ways, difference, with_gradients
from gpu_check.expected import rate
from gpu_check.rows import Row
from gpu_check.sizes import DTYPE, NAME, ON_CUDA, About, Sizes, documents_of
from megatron_vlm.extras.plan.search import ATTENTION
from megatron_vlm.models.costs import pairs_seen
from megatron_vlm.models.layers.attention import Attend, dense
from megatron_vlm.models.layers.attention_kernels import KERNELS, WIDEST
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement, View
from megatron_vlm.models.layers.kernel_checks import LARGEST
from megatron_vlm.models.layers.tower_attention import view_of
from megatron_vlm.parallel import setup

ERRORS = (RuntimeError, NotImplementedError, TypeError)


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    for width in sizes.widths:
        for heads in (sizes.heads, (sizes.heads[0], sizes.heads[0])):
            yield from right(sizes, heads, width)
    for width in sizes.timed_widths:
        yield from speed_of_rows(sizes, width)
        yield from speed_of_skewed(sizes, width)
        yield from speed_of_towers(sizes, width)


def right(sizes: Sizes, heads: tuple[int, int], width: int) -> Iterator[Row]:
    """Rows for each kernel, and one that is wrong if none agrees with dense attention."""
    device, tokens = setup.device(), sizes.attention_tokens
    lengths = [*documents_of(tokens - 1), 1]
    first = lengths[0]
    blocks = [(0, first // 8, first // 4), (1, 0, lengths[1] // 2)]  # as images of Gemma 3
    made = torch.Generator(device).manual_seed(0)
    # views of one tensor, as a layer's linear makes them: their rows do not follow each other in memory
    query_key_value = torch.randn(tokens, heads[0] + 2 * heads[1], width, generator=made, device=device)
    inputs = list(query_key_value.to(DTYPE).split([heads[0], heads[1], heads[1]], dim=1))
    for image_blocks in ([], blocks):
        plan = AttentionPlan(Placement(lengths, image_blocks, 1), 0, tokens, {None, sizes.window}, device)
        for window, view in plan.views.items():
            case = f"{heads[0]} heads, {heads[1]} of keys, {width} wide, window {window}"
            case += ", image blocks" if image_blocks else ""
            yield from compared(case, inputs, plan, view, view)
    blocks = [(document, 0, length) for document, length in enumerate(lengths)]
    plan = AttentionPlan(Placement(lengths, blocks, 1), 0, tokens, {None}, device)
    case = f"{heads[0]} heads, {heads[1]} of keys, {width} wide, all see all"
    yield from compared(case, inputs, plan, view_of(np.array(lengths), device), plan.views[None])


def compared(case: str, inputs: list[Tensor], plan: AttentionPlan, view: View, seen: View) -> Iterator[Row]:
    """Each kernel on `view`, against dense attention with the mask of `seen`."""
    scale = inputs[0].shape[-1] ** -0.5
    wide = [x.float() for x in inputs]
    expected = with_gradients(lambda q, k, v: dense(q, k, v, plan, seen, scale), *wide)
    agrees = False
    for name in KERNELS:
        try:
            found = with_gradients(kernel(name, view, scale), *inputs)
        except ERRORS as error:
            yield Row("attention", f"{name}, {case}: {str(error).splitlines()[0][:160]}", "does not run")
            continue
        row = Row("attention", f"{name}, {case}", difference(found, expected), LARGEST[DTYPE])
        # products serve heads for which there is no kernel
        agrees |= row.verdict == "ok" and (name != "products" or inputs[0].shape[-1] > WIDEST)
        yield row
    plan.masks.clear()
    if not agrees:
        yield Row("attention", case, "no kernel", wrong=True)


def kernel(name: str, view: View, scale: float) -> Callable[..., Tensor]:
    return lambda q, k, v: Attend.apply(q, k, v, view, KERNELS[name], scale)


def speed_of_rows(sizes: Sizes, width: int) -> Iterator[Row]:
    """TFLOP/s of a long row with several documents and with one, beside PyTorch's attention of one."""
    tokens, (queries, keys) = sizes.long_tokens, sizes.heads
    inputs = [
        torch.randn(tokens, n, width, device=setup.device(), dtype=DTYPE) for n in (queries, keys, keys)
    ]
    halves = [tokens // 2] * 2  # which cuDNN does not leave to FlashAttention
    for lengths in (documents_of(tokens), halves, [tokens]):
        plan = AttentionPlan(Placement(lengths, [], 1), 0, tokens, {None}, setup.device())
        case = f"{width} wide, {NAME}, {tokens} tokens in {len(lengths)} documents"
        pairs = float(pairs_seen(np.array(lengths), None).sum())
        yield from speeds(sizes, case, inputs, plan.views[None], 4 * queries * width * pairs)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield speed_row(f"PyTorch's own, {case}", sizes, whole, inputs, 4 * queries * width * pairs)


def speed_of_skewed(sizes: Sizes, width: int) -> Iterator[Row]:
    """A long document and many short ones: kernels that lay out every document as long as the longest need
    many times the memory of the row."""
    tokens, (queries, keys) = sum(sizes.skewed), sizes.heads
    device = setup.device()
    inputs = [torch.randn(tokens, n, width, device=device, dtype=DTYPE) for n in (queries, keys, keys)]
    view = AttentionPlan(Placement(list(sizes.skewed), [], 1), 0, tokens, {None}, device).views[None]
    short = len(sizes.skewed) - 1
    case = f"{width} wide, {NAME}, a document of {sizes.skewed[0]} and {short} of {sizes.skewed[1]} tokens"
    flops = 4 * queries * width * float(pairs_seen(np.array(sizes.skewed), None).sum())
    yield from speeds(sizes, case, inputs, view, flops)


def speed_of_towers(sizes: Sizes, width: int) -> Iterator[Row]:
    segments = np.full(16, max(1, sizes.long_tokens // 32))  # images
    inputs = [torch.randn(segments.sum(), 16, width, device=setup.device(), dtype=DTYPE) for _ in range(3)]
    case = f"{width} wide, {NAME}, {len(segments)} images of {segments[0]} patches"
    flops = 4 * 16 * width * float((segments**2).sum())
    yield from speeds(sizes, case, inputs, view_of(segments, setup.device()), flops)


def speeds(sizes: Sizes, case: str, inputs: list[Tensor], view: View, flops: float) -> Iterator[Row]:
    for name in KERNELS:
        try:
            function = kernel(name, view, inputs[0].shape[-1] ** -0.5)
            held = start_of_peak()
            yield speed_row(f"{name}, {case}", sizes, function, inputs, flops)
            if ON_CUDA:
                peak = (torch.cuda.max_memory_allocated() - held) / 2**30
                yield Row("attention", f"{name}, {case}, peak GiB beside its inputs", peak)
        except torch.OutOfMemoryError:
            yield Row("attention", f"{name}, {case}", "out of memory")
        except ERRORS:
            continue  # `compared` says so


def start_of_peak() -> int:
    """Bytes on the device now, from which its peak is counted."""
    if not ON_CUDA:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def speed_row(what: str, sizes: Sizes, function: Callable, inputs: list[Tensor], flops: float) -> Row:
    """`flops` are of the forward pass; the backward pass has two and a half times as many. The model of time
    counts two."""
    measured = 3.5 * flops / both_ways(sizes, function, *inputs) / 1e12
    name = f"{what}, TFLOP/s" + ("" if ON_CUDA else " of a CPU")
    return Row("attention", name, measured, expected=rate(ATTENTION) * 3.5 / 3 / 1e12)
