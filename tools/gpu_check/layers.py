"""The output layer and a layer of experts, at the sizes of published models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_check.clock import both_ways, difference, seconds, with_gradients
from gpu_check.expected import rate
from gpu_check.rows import Row
from gpu_check.sizes import DTYPE, About, Sizes, described
from gpu_check.stack import built, run_config
from megatron_vlm.extras.plan.search import PRODUCTS
from megatron_vlm.models.head import token_statistics
from megatron_vlm.models.layers.kernel_checks import LARGEST
from megatron_vlm.models.layers.moe import FREE_ROUTE, MoE
from megatron_vlm.parallel import setup

COMPARED = 256  # tokens of the head that are compared in fp32


def head(sizes: Sizes, about: About) -> Iterator[Row]:
    """Log-probabilities forward and backward, beside the four products that they need."""
    text = described("qwen3_vl_8b", sizes.dense).text
    device, vocabulary, width = setup.device(), text.vocab_size, text.hidden_size
    made = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(sizes.head_tokens, width, generator=made, device=device).to(DTYPE)
    weight = (torch.randn(vocabulary, width, generator=made, device=device) / width**0.5).to(DTYPE)
    labels = torch.randint(vocabulary, (sizes.head_tokens,), generator=made, device=device)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_statistics(hidden, weight, labels[: len(hidden)], vocabulary)[0]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = (hidden @ weight.t()).log_softmax(-1)
        return log_p.gather(1, labels[: len(hidden), None])[:, 0]

    few = hidden[:COMPARED]
    expected = with_gradients(plain, few.float(), weight.float())
    error = difference(with_gradients(ours, few, weight), expected)
    yield Row("head", f"of {len(few)} tokens against fp32", error, LARGEST[DTYPE])
    took = both_ways(sizes, ours, hidden, weight)
    name = f"{len(hidden)} tokens, {vocabulary} in the vocabulary, {width} wide"
    modelled = 1000 * 4 * 2 * hidden.numel() * vocabulary / rate(PRODUCTS)
    yield Row("head", f"{name}, forward and backward, milliseconds", 1000 * took, expected=modelled)
    products = four_products(sizes, hidden, weight)
    yield Row("head", f"{name}, over its four products, times", took / products)


def four_products(sizes: Sizes, hidden: Tensor, weight: Tensor) -> float:
    """Seconds of the logits, twice, and of both gradients, in parts that fit."""
    part = hidden[: max(1, len(hidden) // 4)]
    gradient = torch.randn(len(part), len(weight), device=weight.device, dtype=weight.dtype)

    def products() -> None:
        part @ weight.t()
        part @ weight.t()
        gradient @ weight
        gradient.t() @ part

    return seconds(products, sizes.rounds) * len(hidden) / len(part)


def experts(sizes: Sizes, about: About) -> Iterator[Row]:
    """The routed feed-forward of Qwen3-VL-30B-A3B, forward and backward, beside one product of its size."""
    chunks, description = built(run_config(sizes.rows[0]), "qwen3_vl_30b_a3b", sizes.experts)
    layer = next(module for module in chunks[0].modules() if isinstance(module, MoE))
    architecture, tokens = description.architecture, sizes.rows[0]
    width, chosen = architecture["hidden_size"], architecture["moe_router_topk"]
    ffn = architecture["moe_ffn_hidden_size"]
    device, dtype = setup.device(), layer.experts.linear_fc1.dtype
    hidden = torch.randn(tokens, 1, width, device=device, dtype=dtype, requires_grad=True)
    routes = torch.full((1, tokens, 1, chosen), FREE_ROUTE, device=device, dtype=torch.int16)
    trained = [hidden, *layer.experts.parameters()]
    gradient = torch.randn_like(hidden)
    call = lambda: torch.autograd.grad(layer(hidden, routes)[0], trained, gradient)  # noqa: E731
    took = seconds(call, sizes.rounds)
    flops = 3 * 2 * tokens * chosen * 3 * width * ffn
    name = f"{tokens} tokens, {layer.experts.experts} experts, {chosen} of each token"
    yield Row("experts", f"{name}, forward and backward, milliseconds", 1000 * took)
    yield Row("experts", f"{name}, TFLOP/s", flops / took / 1e12, expected=rate(PRODUCTS) / 1e12)
    rows = torch.randn(tokens * chosen, width, device=device, dtype=dtype)
    one = torch.randn(3 * ffn, width, device=device, dtype=dtype)
    dense = both_ways(sizes, torch.nn.functional.linear, rows, one)
    yield Row("experts", f"{name}, over one dense product of as many operations, times", took / dense)
