"""Experts' products are right where torch's kernels on CUDA need not be: a stand-in does what they may do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vlm.parallel import linears
from megatron_vlm.parallel.linears import grouped_product

COUNTS = {
    "each has rows": [3, 4, 1, 2],
    "empty groups": [0, 5, 0, 5, 0],
    "one group has all": [0, 0, 10],
    "no row": [0, 0, 0],
}


def kernel(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """A grouped product in dirty memory: it writes what groups with rows give, and nothing else.

    It knows no product without rows, and none of operands that 32 bits do not count.
    """
    a_rows = a if b.dim() == 3 else a.mT
    assert len(a_rows) > 0 and offs.dtype == torch.int32 and offs[-1] == len(a_rows)
    assert all(x.numel() <= linears.MOST_NUMBERS for x in (a, b) if x.dim() == 2)
    shape = (len(a), b.shape[2]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])
    output, start = a.new_full(shape, torch.nan), 0
    for group, end in enumerate(offs.tolist()):
        if b.dim() == 3:
            output[start:end] = a[start:end] @ b[group]
        elif end > start:
            output[group] = a[:, start:end] @ b[start:end]
        start = end
    assert output.dim() == 3 or output.numel() <= linears.MOST_NUMBERS
    return output


class Kernel(torch.autograd.Function):
    """`kernel`, as are its gradients."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        return kernel(a, b, offs=offs)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        a, b, offs = ctx.saved_tensors
        return kernel(gradient, b.mT, offs=offs), kernel(a.mT, gradient, offs=offs), None


def one_by_one(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    parts = rows.split(counts)
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


@pytest.fixture(params=["torch's on a CPU", "a dirty one"])
def product(request, monkeypatch):
    if request.param == "a dirty one":
        monkeypatch.setattr(linears, "grouped_mm", lambda a, b, offs: Kernel.apply(a, b, offs))


@pytest.mark.parametrize("widths", [(8, 16), (5, 12)])  # the second is filled up to multiples of eight
@pytest.mark.parametrize("most", [2**31 - 1, 16 * 4, 16 * 1])  # rows in one run, in several, one by one
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_and_gradients_are_those_of_each_expert(product, counts, most, widths, monkeypatch):
    monkeypatch.setattr(linears, "MOST_NUMBERS", most)
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), widths[0], requires_grad=True)
    weights = torch.randn(len(counts), widths[1], widths[0], requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).int()
    found, expected = grouped_product(rows, weights, ends), one_by_one(rows, weights, counts)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(output, (rows, weights), gradient) for output in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert not ours[1][torch.tensor(counts) == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_megatrons_buffer(product, monkeypatch, dtype):
    """Of two micro batches, in fp32: rounded nowhere, and nothing is made for experts without rows."""
    monkeypatch.setattr(linears, "in_product", True)
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(4, 16, 8, generator=generator).to(dtype))
    weights.main_grad = torch.zeros(weights.shape)
    expected = torch.zeros(weights.shape)
    for counts in ([3, 0, 4, 1], [0, 0, 6, 2]):
        rows = torch.randn(sum(counts), 8, generator=generator).to(dtype)
        gradient = torch.randn(sum(counts), 16, generator=generator).to(dtype)
        ends = torch.tensor(counts).cumsum(0).int()
        grouped_product(rows, weights, ends, counts).backward(gradient)
        assert weights.grad_added_to_main_grad
        for expert, (x, grad) in enumerate(zip(rows.split(counts), gradient.split(counts), strict=True)):
            expected[expert] += grad.float().t() @ x.float()
    torch.testing.assert_close(weights.main_grad, expected, atol=1e-6, rtol=1e-6)


def test_the_stand_in_leaves_what_a_kernel_may_leave():
    rows, weights = torch.randn(4, 8), torch.randn(2, 8, 8, requires_grad=True)
    Kernel.apply(rows, weights.mT, torch.tensor([0, 4], dtype=torch.int32)).sum().backward()
    assert weights.grad[0].isnan().all() and not weights.grad[1].isnan().any()
