"""Norms, rotary embeddings and gates: what they compute and keep is the same written and compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from megatron_vlm.config import ConfigError, ModelConfig
from megatron_vlm.models.layers import fused
from megatron_vlm.models.layers.fused import (
    Fused,
    HeadSettings,
    compiled_on,
    gated,
    merge_leading_dims,
    norm,
    of_channels,
    rotate,
    turned_heads,
)
from megatron_vlm.models.layers.kernel_checks import check, fused_disagreement

CPU = torch.device("cpu")
TOKENS, HEADS, HEAD, WIDTH = 7, 3, 8, 16
FUNCTIONS = (
    *(fused.normed, fused._norm_backward, fused.rotate_rows),
    *(fused._gate, fused._gate_backward),
    *(fused._turned_heads, fused._turned_heads_backward),
)


# -- the same in PyTorch's own operations, which autograd differentiates; the order is that of Transformers


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float() if x.dtype != torch.float64 else x
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.to(x32.dtype))).to(x.dtype)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float() if x.dtype != torch.float64 else x
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = x.chunk(2, dim=-1)
    x = x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((x, rest), dim=-1)


def turned_by_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As complex numbers: a channel is a real part, the next one its imaginary part."""
    x, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    cos, sin = (table.repeat_interleave(2, dim=-1) for table in (cos, sin))
    imaginary = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((x * cos + imaginary * sin, rest), dim=-1)


def glu(gate_up: Tensor, activation: Callable, weights: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner = activation(gate) * up
    return inner if weights is None else (inner * weights[:, None]).to(gate_up.dtype)


def tables(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(TOKENS * width // 2).reshape(TOKENS, 1, 1, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def pair(ours: Callable, plain: Callable, *more) -> tuple[Callable, Callable]:
    return lambda *x: ours(*x, *more), lambda *x: plain(*x, *more)


def heads(rows: Tensor, *weights: Tensor, queries: Callable, has_gates: bool, scaled: bool) -> list[Tensor]:
    """Queries, keys, values and gates by `queries`, of two groups; with `scaled`, queries have a table of
    their own."""
    cos, sin = tables(HEAD, rows.dtype)
    turns = [[cos * 2, sin * 2], [cos, sin]] if scaled else [[cos, sin]]
    return queries(rows, weights or (None, None), turns, has_gates)


def our_heads(rows: Tensor, weights: tuple, turns: list, has_gates: bool) -> tuple[Tensor, ...]:
    settings = HeadSettings(1e-6, False, False, False, has_gates)
    return turned_heads(rows, weights, [of_channels(*table) for table in turns], settings)


def plain_heads(rows: Tensor, weights: tuple, turns: list, has_gates: bool) -> list[Tensor]:
    """From each group's queries, each followed by its gate if there are any, its key and its value."""
    query, key, value, gates = rows[..., :-2, :], rows[..., -2, :], rows[..., -1, :], []
    if has_gates:
        query, gates = query[..., 0::2, :], [query[..., 1::2, :].flatten(2)]
    query = query.flatten(2, 3)
    if weights[0] is not None:
        query, key = llama_norm(query, weights[0]), llama_norm(key, weights[1])
    return [turned(query, *turns[0]), turned(key, *turns[-1]), value, *gates]


def heads_pair(has_gates: bool = False, scaled: bool = False) -> tuple[Callable, Callable]:
    """`our_heads` and `plain_heads`, with all heads side by side."""

    def side_by_side(queries: Callable) -> Callable:
        made = partial(heads, queries=queries, has_gates=has_gates, scaled=scaled)
        return lambda *given: torch.cat([x.flatten(2) for x in made(*given)], dim=-1)

    return side_by_side(our_heads), side_by_side(plain_heads)


GELU = ACT2FN["gelu_pytorch_tanh"]
HIDDEN, QUERY, ROWS = (TOKENS, 1, WIDTH), (TOKENS, 1, HEADS, HEAD), (TOKENS, 1, 2, 6, HEAD)
CASES = {  # ours, the same in plain operations, shapes of the inputs
    "Gemma's norm": (lambda *x: norm(*x, 1e-6, True), gemma_norm, [HIDDEN, (WIDTH,)]),
    "Llama's norm": (lambda *x: norm(*x, 1e-6, False), llama_norm, [HIDDEN, (WIDTH,)]),
    "norm of heads": (lambda *x: norm(*x, 1e-6, False), llama_norm, [QUERY, (HEAD,)]),
    "rotary": (
        lambda x: rotate(x, *of_channels(*tables(8, x.dtype))),
        lambda x: turned(x, *tables(8, x.dtype)),
        [QUERY],
    ),
    "rotary of a part": (
        lambda x: rotate(x, *of_channels(*tables(4, x.dtype))),
        lambda x: turned(x, *tables(4, x.dtype)),
        [QUERY],
    ),
    "rotary of neighbours": (
        lambda x: rotate(x, *of_channels(*tables(4, x.dtype), adjacent=True), adjacent=True),
        lambda x: turned_by_neighbours(x, *tables(4, x.dtype)),
        [QUERY],
    ),
    "heads": (*heads_pair(), [ROWS]),
    "heads with norms": (*heads_pair(scaled=True), [ROWS, (HEAD,), (HEAD,)]),
    "heads with gates": (*heads_pair(has_gates=True), [ROWS]),
    "heads with norms and gates": (*heads_pair(has_gates=True), [ROWS, (HEAD,), (HEAD,)]),
    "SwiGLU": (*pair(gated, glu, silu), [HIDDEN]),
    "GeGLU": (*pair(gated, glu, GELU), [HIDDEN]),
    "another gate": (*pair(gated, glu, ACT2FN["relu2"]), [HIDDEN]),
    "gate with weights": (
        lambda x, w: gated(x, silu, w),
        lambda x, w: glu(x, silu, w),
        [(TOKENS, WIDTH), (TOKENS,)],
    ),
    "no row": (lambda x, w: gated(x, silu, w), lambda x, w: glu(x, silu, w), [(0, WIDTH), (0,)]),
}


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_plain_operations(name, dtype):
    ours, plain, shapes = CASES[name]
    given = inputs(shapes, dtype)
    found, expected = ours(*given), plain(*given)
    assert found.dtype == dtype and torch.equal(found, expected)
    gradient = torch.randn(found.shape).to(dtype)
    grads = (torch.autograd.grad(output, given, gradient) for output in (found, expected))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]  # plain operations round more often
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_its_backward_pass_is_the_derivative(name):
    ours, _, shapes = CASES[name]
    assert torch.autograd.gradcheck(ours, inputs(shapes, torch.float64))


@pytest.mark.parametrize("trained", [0, 1])
def test_one_of_two_norms_of_heads_is_trained_alone(trained):
    rows, *weights = (x.detach() for x in inputs([ROWS, (HEAD,), (HEAD,)], torch.float32))
    weights[trained].requires_grad_()
    found = []
    for heads in heads_pair():
        heads(rows, *weights).square().sum().backward()
        found.append(weights[trained].grad)
        weights[trained].grad = None
    torch.testing.assert_close(*found)


def test_axes_are_joined_without_a_copy():
    """Queries and keys as they lie in one product: both are views with gaps."""
    all_three = torch.randn(5, 1, 3, 4, HEAD, dtype=torch.float64, requires_grad=True)
    query, key = all_three[..., :2, :], all_three[..., 2:3, :]
    for x, shape in ((query, (15, 2, HEAD)), (key, (15, HEAD))):
        assert merge_leading_dims(x) is x
        with compiled_on("cpu"):
            assert merge_leading_dims(x).shape == shape and merge_leading_dims(x).data_ptr() == x.data_ptr()
            assert torch.equal(merge_leading_dims(x), x.reshape(shape))
        weight = torch.rand(HEAD, dtype=torch.float64, requires_grad=True)
        found, expected = norm(x, weight, 1e-6, False), llama_norm(x, weight)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(y.square().sum(), (all_three, weight)) for y in (found, expected))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)
    with compiled_on("cpu"):
        assert merge_leading_dims(all_three).shape == (60, HEAD) and merge_leading_dims(
            all_three[:1, 0, 0, 0]
        ).shape == (
            1,
            HEAD,
        )


def kept(function: Callable, given: list[Tensor]) -> int:
    """Bytes kept for the backward pass besides weights, which are there anyway."""
    found: dict[int, Tensor] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(t.data_ptr(), t), lambda t: t)
    with hooks:
        function(*given)
    weights = {weight.data_ptr() for weight in given[1:]}
    return sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_as_little_as_it_can(dtype):
    size, numbers = dtype.itemsize, TOKENS * WIDTH
    table = 2 * TOKENS * HEAD * size  # cos and sin
    found = {name: kept(ours, inputs(shapes, dtype)) for name, (ours, _, shapes) in CASES.items()}
    assert found == {
        "Gemma's norm": numbers * size + 4 * TOKENS,
        "Llama's norm": numbers * size + 4 * TOKENS,
        "norm of heads": TOKENS * HEADS * (HEAD * size + 4),
        "rotary": 2 * TOKENS * HEAD * size,
        "rotary of a part": 2 * TOKENS * HEAD // 2 * size,
        "rotary of neighbours": 2 * TOKENS * HEAD // 2 * size,
        "heads": table,
        "heads with norms": 2 * table + TOKENS * 2 * (6 * HEAD * size + 5 * 4),
        "heads with gates": table,
        "heads with norms and gates": table + TOKENS * 2 * (6 * HEAD * size + 3 * 4),
        "SwiGLU": numbers * size,
        "GeGLU": numbers * size,
        "another gate": numbers * size,
        "gate with weights": numbers * size,
        "no row": 0,
    }


CONFIG = SimpleNamespace(
    hidden_size=WIDTH,
    kv_channels=HEAD,
    ffn_hidden_size=24,
    activation_func=silu,
    layernorm_zero_centered_gamma=False,
    layernorm_epsilon=1e-6,
    rotary_interleaved=False,
    num_moe_experts=2,
    qk_layernorm=True,
    attention_output_gate=False,
    latent_heads=None,
    layer_heads=(),
    tensor_model_parallel_size=1,
    params_dtype=torch.bfloat16,
)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_compiled_once_it_gives_the_same_for_every_length():
    """On a CPU, with the compiler's kernels for that; on a GPU nothing of this has run yet."""
    from torch._dynamo.utils import counters

    counters.clear()
    with torch.compiler.set_stance("default"), compiled_on("cpu"):
        config = SimpleNamespace(**vars(CONFIG))
        config.activation_func, config.params_dtype = GELU, torch.float32
        config.layernorm_zero_centered_gamma = True
        assert fused_disagreement(config, CPU) is None
    # `rotate_rows` is a part of others; the gate's two have one more with weights, the heads' two of a part
    assert counters["stats"]["unique_graphs"] == len(FUNCTIONS) + 3 and not counters["graph_break"]


def test_a_registered_pytree_node_compiles_nothing_again(monkeypatch):
    """Each import of a package may register some; after eight graphs the compiler would give up."""
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fused._gate_backward.written, dynamic=True, backend=counted)
    monkeypatch.setitem(vars(fused._gate_backward), "compiled", compiled)
    found = []
    with torch.compiler.set_stance("default"), compiled_on("cpu"):
        for _ in range(2):
            [x] = inputs([(6, WIDTH)], torch.float32)
            gated(x, GELU).sum().backward()
            found.append(x.grad)
            torch.utils._pytree.register_pytree_node(type("Node", (), {}), lambda _: ([], None), print)
    [x] = inputs([(6, WIDTH)], torch.float32)
    glu(x, GELU).sum().backward()
    for gradient in found:
        torch.testing.assert_close(gradient, x.grad)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", [silu, ACT2FN["silu"].forward, GELU.forward])
def test_derivatives_are_autograds(activation, dtype):
    x, gradient = (torch.randn(1000, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
    ours = fused.DERIVATIVES[getattr(activation, "__func__", activation)](gradient, x)
    assert torch.equal(ours, fused._differentiated(activation, gradient, x))


# -- the check before a run


@pytest.fixture
def without_compiler(monkeypatch):
    """The written functions in the place of compiled ones."""
    for function in FUNCTIONS:
        monkeypatch.setitem(vars(function), "compiled", function.written)
    with compiled_on("cpu"):
        yield monkeypatch


def test_the_check_leaves_what_agrees(without_compiler, recwarn):
    check("fused", fused_disagreement(CONFIG, CPU), ModelConfig())
    assert Fused.compiles_on == "cpu" and not recwarn.list


def test_the_check_turns_the_compiler_off_where_it_differs(without_compiler):
    def wrong(*given):
        of_x, of_weight = fused._norm_backward.written(*given)
        return of_x * 1.1, of_weight

    without_compiler.setitem(vars(fused._norm_backward), "compiled", wrong)
    with pytest.raises(
        ConfigError,
        match=r"of 509 tokens, .+ model.fallbacks=\[fused\] trains with norms, rotary",
    ):
        check("fused", fused_disagreement(CONFIG, CPU), ModelConfig())
    assert Fused.compiles_on == "cpu"
    with pytest.warns(UserWarning, match="fused, norm of 509 tokens, compiled, differs by .* The run goes"):
        check("fused", fused_disagreement(CONFIG, CPU), ModelConfig(fallbacks=["fused"]))
    assert Fused.compiles_on is None
