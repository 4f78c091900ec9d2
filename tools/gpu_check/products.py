"""Products that some cards compute wrongly or slowly: grouped ones, and the patch embedding of a tower."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv3d, linear

from gpu_check.clock import both_ways, difference, with_gradients
from gpu_check.rows import Row
from gpu_check.sizes import DTYPE, NAME, ON_CUDA, About, Sizes
from megatron_vlm.models.layers.kernel_checks import LARGEST
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.linears import grouped_product

COUNTS = {
    "empty groups": [0, 100, 0, 1, 27, 0],
    "only the last has rows": [0, 0, 0, 0, 0, 128],
    "no rows": [0, 0, 0, 0, 0, 0],
}


def grouped(sizes: Sizes, about: About) -> Iterator[Row]:
    """Outputs and gradients against one product for each group, in memory that holds NaN before."""
    for case, counts in COUNTS.items():
        yield Row("grouped", f"{case}, in dirty memory", grouped_error(sizes, counts), LARGEST[DTYPE])
    yield Row("grouped", f"{sizes.numbers:,} numbers in one operand", large_error(sizes), LARGEST[DTYPE])


def grouped_error(sizes: Sizes, counts: list[int]) -> float:
    device, (width, ffn) = setup.device(), sizes.grouped
    made = torch.Generator(device).manual_seed(0)
    rows = torch.randn(sum(counts), width, generator=made, device=device).to(DTYPE)
    weights = torch.randn(len(counts), ffn, width, generator=made, device=device).to(DTYPE)
    ends = torch.tensor(counts, device=device).cumsum(0).int()

    def loop(rows: Tensor, weights: Tensor) -> Tensor:
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])

    expected = with_gradients(loop, rows, weights)
    for size in (len(weights), 1, 1):  # what the allocator hands out next
        torch.full((size, ffn, width), torch.nan, device=device, dtype=DTYPE)
    found = with_gradients(lambda rows, weights: grouped_product(rows, weights, ends), rows, weights)
    if not sum(counts):  # the expected gradients are zero, which a share of the largest cannot be taken of
        return max(x.float().abs().max().item() if x.numel() else 0.0 for x in found)
    return difference(found, expected)


def large_error(sizes: Sizes) -> float:
    """The last rows of an operand of more numbers than 32 bits count."""
    device, width = setup.device(), sizes.grouped[0]
    rows = torch.zeros(sizes.numbers // width + 128, width, device=device, dtype=DTYPE)
    rows[-128:] = torch.randn(128, width, device=device)
    weights = torch.randn(2, 64, width, device=device, dtype=DTYPE)
    ends = torch.tensor([len(rows) - 64, len(rows)], device=device, dtype=torch.int32)
    with torch.no_grad():
        found = grouped_product(rows, weights, ends)[-128:]
        expected = torch.cat([rows[-128:-64] @ weights[0].t(), rows[-64:] @ weights[1].t()])
    return difference([found], [expected])


def patches(sizes: Sizes, about: About) -> Iterator[Row]:
    """The embedding of patches of 2 x 16 x 16 pixels, as a convolution and as a product."""
    device, shape = setup.device(), (3, 2, 16, 16)
    pixels = torch.randn(sizes.patches, *shape, device=device, dtype=DTYPE)
    weight = torch.randn(sizes.tower_width, *shape, device=device, dtype=DTYPE) / 40

    def convolved(pixels: Tensor, weight: Tensor) -> Tensor:
        return conv3d(pixels, weight, stride=shape[1:]).flatten(1)

    def product(pixels: Tensor, weight: Tensor) -> Tensor:
        return linear(pixels.flatten(1), weight.flatten(1))

    error = difference(*(with_gradients(each, pixels, weight) for each in (convolved, product)))
    yield Row("patches", f"Conv3d against a linear, {NAME}", error, LARGEST[DTYPE])
    times = {}
    for name, function in (("a linear", product), ("Conv3d", convolved)):
        times[name] = both_ways(sizes, function, pixels, weight)
        on = "" if ON_CUDA else " on a CPU"
        yield Row("patches", f"{name}, {sizes.patches} patches{on}, milliseconds", 1000 * times[name])
    yield Row("patches", "Conv3d over a linear, times", times["Conv3d"] / times["a linear"])
