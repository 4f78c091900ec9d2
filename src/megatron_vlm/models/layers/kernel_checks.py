"""A look at kernels before a run relies on them: on a few hundred tokens they agree with the reference."""

import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.config import ConfigError, ModelConfig, ParallelConfig
from megatron_vlm.job import watchdog
from megatron_vlm.models.layers.attention import Attend, dense
from megatron_vlm.models.layers.attention_kernels import KERNELS, WIDEST, flash4_is_installed
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement, View
from megatron_vlm.models.layers.attention_sizes import RECURRENT, DeltaHeads
from megatron_vlm.models.layers.delta_net import (
    GatedDeltaNet,
    Kernels,
    convolution,
    delta_rule,
    installed_kernels,
)
from megatron_vlm.models.layers.delta_rule import Documents
from megatron_vlm.models.layers.fused import (
    Fused,
    HeadSettings,
    compiled_on,
    gated,
    norm,
    of_channels,
    rotate,
    turned_heads,
)
from megatron_vlm.models.layers.fused_towers import FusedCase, fused_tower_cases
from megatron_vlm.models.layers.tower_attention import heads, kernels, use_sdpa, view_of
from megatron_vlm.parallel import linears
from megatron_vlm.parallel.linears import GatheredProduct, ScatteredProduct, wgrad_gemm_accum_fp32
from megatron_vlm.parallel.setup import from_all_ranks, local_rank_0_first

FOR_CUDA = ("flash", "cudnn", "flash4")  # in 16 bits
ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, OSError, subprocess.SubprocessError)
LARGEST = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # difference allowed, of the largest number
# Lengths of documents with blocks in them: cuDNN leaves the first to FlashAttention (`Segments.is_even`), and
# of the second the number of tokens is no multiple.
DOCUMENTS, BLOCKS = ([300, 1, 192, 12, 7], [509, 400, 300, 1]), [(0, 20, 150), (2, 181, 192)]
MEASURED = [8192, 4096, 4096]
# of a real size, as flash-linear-attention tunes its kernels in their first call
DELTA_LENGTHS = [*MEASURED, *DOCUMENTS[0]]
SLOWER = {
    "attention": "dense attention: slow, with memory that grows as the square of a row",
    "towers": "Transformers' own attention: slower, with a call for each image or a mask of all patches",
    "fused": "norms, rotary embeddings and gates as they are written: slower, with the same results",
    "delta_nets": "these in plain PyTorch: slower, with more memory",
    "weight_gradients": "gradients that are made first and then added: slower",
}
OVERLAP = "parallel.tp_comm_overlap: products that exchange rows"
WITHOUT = "parallel.tp_comm_overlap=false trains with exchanges before and after them."
WITHOUT_KERNEL = {
    **dict.fromkeys(("cudnn", "flash4"), "model.attention=flash trains without it."),
    "flash": "model.attention=dense trains without it, slowly.",
    "flash-linear-attention": "a run trains without it if the package is not installed.",
}
chosen: dict[str, str] = {}  # the kernel of each part and width of heads; checkpoints keep it


def attention_backends(
    megatron_config: TransformerConfig, model: ModelConfig, device: torch.device
) -> dict[int, str]:
    """The backend of `models.layers.attention` by the channels of a layer's heads: what `model.attention`
    means on this device. Kernels for CUDA are compared with dense attention before, and "auto" takes the
    fastest that agrees. Heads for which there is none have "products" instead.

    Raises ConfigError where none agrees and `model.fallbacks` does not name attention.
    """
    windows = megatron_config.layer_windows or (None,) * megatron_config.num_layers
    heads_of_all = (megatron_config.kv_channels, megatron_config.num_query_groups)
    heads_of_layers = [heads[:2] for heads in megatron_config.layer_heads] or [heads_of_all] * len(windows)
    backend = model.attention
    if backend == "auto" and device.type != "cuda":
        backend = "documents"
    elif backend == "auto" and model.dtype == "fp32":  # the kernels are for 16 bits
        backend = "dense"
    backends = {
        channels: "products" if channels > WIDEST and backend in ("auto", *FOR_CUDA) else backend
        for channels, _ in heads_of_layers
    }
    if device.type != "cuda" or backend == "dense":
        return backends
    windows_of_heads: dict[tuple[int, int], set[int | None]] = {}
    for window, heads_of_layer in zip(windows, heads_of_layers, strict=True):
        if window != RECURRENT:
            windows_of_heads.setdefault(heads_of_layer, set()).add(window)
    tp = megatron_config.tensor_model_parallel_size
    dtype = megatron_config.params_dtype
    for (channels, groups), of_layers in windows_of_heads.items():
        sizes = (megatron_config.num_attention_heads // tp, groups // tp, channels)
        name = backends[channels]
        names = names_for_cuda() if name == "auto" else (name,)
        cases = layer_cases(of_layers, device)
        problems = {name: disagreement(name, sizes, dtype, cases) for name in names}
        measured = AttentionPlan(Placement(MEASURED, [], 1), 0, sum(MEASURED), of_layers, device)
        views = list(measured.views.values())
        fastest = _fastest("attention", model, problems, sizes, dtype, views, dist.group.WORLD)
        backends[channels] = fastest or "dense"
    return backends


def check_towers(vision: nn.Module, device: torch.device, dtype: torch.dtype, model: ModelConfig) -> None:
    """Gives towers on CUDA the fastest kernel that agrees with dense attention. Raises ConfigError if none
    does, or gives them Transformers' own attention if `model.fallbacks` names towers.

    In fp32, for which there is no kernel, they have Transformers' own.
    """
    if dtype == torch.float32:
        return use_sdpa(vision)
    names = (model.attention,) if model.attention in FOR_CUDA else names_for_cuda()
    stage_ranks = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    cases = tower_cases(device)
    for number, width in heads(vision):
        sizes = (number, number, width)
        problems = {name: disagreement(name, sizes, dtype, cases) for name in names}
        measured = [view_of(np.full(16, 1024), device)]
        fastest = _fastest("towers", model, problems, sizes, dtype, measured, stage_ranks)
        if fastest is None:
            return use_sdpa(vision)
        kernels[number, width] = fastest


def names_for_cuda() -> tuple[str, ...]:
    """The kernels to choose from. Torch cannot tell cuDNN's backward pass to add in a fixed order."""
    if torch.are_deterministic_algorithms_enabled():
        return FOR_CUDA[:1]
    return FOR_CUDA if flash4_is_installed() else FOR_CUDA[:2]


def _fastest(
    part: str,
    model: ModelConfig,
    problems: dict[str, str | None],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    views: list[View],
    ranks: dist.ProcessGroup,
) -> str | None:
    """The kernel without a problem on any rank that takes the fewest seconds over all views, on all `ranks`.

    Forward and backward count; the first takes the place of one that is at most 5 % faster. A kernel in
    `chosen` stays. None, or as `fall_back` raises, if all have a problem. Collective over `ranks`.
    """
    heads = f"{part}, heads of {sizes[2]}"
    # ranks may disagree, such as machines with other packages: what one lacks, none takes
    of_ranks = dict(from_all_ranks((watchdog.rank(), problems), ranks))
    agreeing, failures = [], []
    for name in dict.fromkeys(chain.from_iterable(of_ranks.values())):
        texts = {rank: of_rank.get(name, f"{name} is not installed") for rank, of_rank in of_ranks.items()}
        failing = {rank: text for rank, text in texts.items() if text}
        if not failing:
            agreeing.append(name)
            continue
        rank, text = next(iter(failing.items()))
        if len(failing) < len(texts):
            text = f"rank {rank}: {text}"
            warnings.warn(f"{heads}: {text}; no rank takes it", stacklevel=2)
        failures.append(text)
    if not agreeing:
        return fall_back(part, model, f"heads of {sizes[2]}: {'; '.join(failures)}")
    # a resumed run keeps its kernel; else all are timed
    before = chosen.get(heads)
    if before not in agreeing:
        times = dict.fromkeys(agreeing, 0.0)
        if len(agreeing) > 1:
            times = {name: sum(_seconds(name, sizes, dtype, view) for view in views) for name in agreeing}
        times_of_ranks = from_all_ranks(times, ranks)
        totals = {name: sum(of_rank[name] for of_rank in times_of_ranks) for name in agreeing}
        chosen[heads] = min(totals, key=lambda name: totals[name] * (0.95 if name == agreeing[0] else 1))
        if before is not None:
            warnings.warn(f"{heads}: {before} so far, {chosen[heads]} from here on", stacklevel=2)
    return chosen[heads]


def fall_back(part: str, model: ModelConfig, problem: str) -> None:
    """Warns of what takes a kernel's place if `model.fallbacks` names its part. Else raises ConfigError."""
    may_fall_back = part in model.fallbacks
    goes_on = (
        "The run goes on"
        if may_fall_back
        else f"model.fallbacks=[{','.join([*model.fallbacks, part])}] trains"
    )
    message = f"{part}, {problem}. {goes_on} with {SLOWER[part]}."
    if not may_fall_back:
        raise ConfigError(message)
    warnings.warn(message, stacklevel=2)


def check(part: str, problem: str | None, model: ModelConfig) -> None:
    """Turns off "fused" or "weight_gradients" if there is a problem, or raises ConfigError as `fall_back`."""
    if problem is None:
        return
    fall_back(part, model, problem)
    if part == "fused":
        Fused.compiles_on = None
    else:
        linears.in_product = False


Case = tuple[AttentionPlan, dict[int | None, View]]  # a plan for dense attention, and what kernels get


def layer_cases(windows: set[int | None], device: torch.device) -> list[Case]:
    """Cases of layers with these windows."""
    plans = [AttentionPlan(Placement(n, BLOCKS, 1), 0, sum(n), windows, device) for n in DOCUMENTS]
    return [(plan, plan.views) for plan in plans]


def tower_cases(device: torch.device) -> list[Case]:
    """Cases in which all patches of a segment see each other."""
    cases = []
    for lengths in DOCUMENTS:
        blocks = [(document, 0, length) for document, length in enumerate(lengths)]
        plan = AttentionPlan(Placement(lengths, blocks, 1), 0, sum(lengths), {None}, device)
        cases.append((plan, {None: view_of(np.array(lengths), device)}))
    return cases


def disagreement(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, cases: list[Case]) -> str | None:
    """Says to the user what is wrong with the backend on the cases' device; None if nothing is.

    `sizes` are the numbers of query heads, of key heads and of channels. Context and gradients on each view
    are compared with dense attention in fp32 with the mask of the plan's own.
    """
    for plan, views in cases:
        tensors = _attention_inputs(sizes, plan.length, plan.device, dtype)
        scale = sizes[2] ** -0.5
        for window, view in views.items():
            seen = partial(dense, plan=plan, view=plan.views[window], scale=scale)
            expected = _with_gradients(_widened(tensors), seen)
            attended = partial(_attended, name=name, view=view, scale=scale)
            if problem := problem_of(name, attended, tensors, expected):
                return f"{name} {problem}" + (f" in layers of window {window}" if window else "")
    return None


def _attention_inputs(
    sizes: tuple[int, int, int], tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key, value and the gradient of the context. The value is a part of a linear's output, as in
    `turned_heads`."""
    queries, keys, width = sizes
    random = _random(device, dtype)
    value = random(tokens, keys, queries // keys + 2, width)[:, :, -1]
    return [
        random(tokens, queries, width),
        random(tokens, keys, width),
        value,
        random(tokens, queries, width),
    ]


def _attended(q: Tensor, k: Tensor, v: Tensor, name: str, view: View, scale: float) -> Tensor:
    return Attend.apply(q, k, v, view, KERNELS[name], scale)


def _seconds(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, view: View) -> float:
    """The least of three, after one that may have to plan."""
    segments = view.segments
    tensors = _attention_inputs(sizes, int(segments.query_lengths.sum()), segments.device, dtype)
    attend = partial(_attended, name=name, view=view, scale=sizes[2] ** -0.5)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        _with_gradients(tensors, attend)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


# --- a comparison with plain PyTorch -----------------------------------------------------------------------


def problem_of(
    name: str,
    function: Callable[..., Tensor],
    tensors: list[Tensor],
    expected: list[Tensor],
    errors: tuple[type[Exception], ...] = ERRORS,
) -> str | None:
    """Says how a function's result and gradients differ from the expected ones; None if they agree.

    `tensors` are the function's, and last the gradient of its result. Raises as `touch`.
    """
    watchdog.beat()
    try:
        results = _with_gradients(tensors, function)
        differences = [_difference(*both) for both in zip(results, expected, strict=True)]
    except errors as error:
        touch(tensors[0].device, name, error)
        return f"does not run here ({_in_one_line(error)})"
    for number, difference in enumerate(differences):
        if not difference <= LARGEST[tensors[-1].dtype]:
            return f"differs by {difference:.1e} in its {f'gradient {number}' if number else 'result'}"
    return None


def touch(device: torch.device, name: str, error: Exception) -> None:
    """Raise ConfigError if a device does not compute any more since `error`, such as an illegal address.

    All that came after it would fail, too, and name something else.
    """
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError as broken:
        remedy = WITHOUT_KERNEL.get(name, "report this, with the versions of torch and of the driver.")
        raise ConfigError(
            f"{name} broke the device in its check before the run ({_in_one_line(error)}); {remedy}"
        ) from broken


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _random(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of lengths that makes tensors, the same numbers at every start."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


def _widened(tensors: list[Tensor]) -> list[Tensor]:
    return [x.float() for x in tensors]


def _with_gradients(tensors: list[Tensor], function: Callable[..., Tensor]) -> list[Tensor]:
    """The function's result and gradients; the last tensor is the gradient of its result."""
    *inputs, gradient = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]  # with their strides
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def _difference(ours: Tensor, expected: Tensor) -> float:
    """The largest, of the largest number expected."""
    return ((ours.float() - expected).abs().max() / expected.abs().max()).item()


# --- norms, rotary embeddings and gates -------------------------------------------------------------------


def fused_disagreement(megatron_config: TransformerConfig, device: torch.device) -> str | None:
    """Says to the user what is wrong with the compiled functions on this device; None if nothing is."""
    return _compiled_disagreement(partial(fused_cases, megatron_config, device=device))


def tower_disagreement(vision: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """`fused_disagreement` of the towers in `vision`."""
    return _compiled_disagreement(partial(fused_tower_cases, vision, random=_random(device, dtype)))


def _compiled_disagreement(cases: Callable[[int], dict[str, FusedCase]]) -> str | None:
    for tokens in (509, 37):  # what is compiled for one length, which no axis of a model has, serves others
        for name, (function, tensors) in cases(tokens).items():
            with compiled_on(None):
                expected = _with_gradients(_widened(tensors), function)
            if problem := problem_of(name, function, tensors, expected):
                return f"{name} of {tokens} tokens, compiled, {problem}"
    return None


def fused_cases(
    megatron_config: TransformerConfig, tokens: int, device: torch.device
) -> dict[str, FusedCase]:
    """Functions of tensors by name, with random ones for it; the last is the gradient of its result."""
    random = _random(device, megatron_config.params_dtype)
    width = megatron_config.hidden_size
    head = megatron_config.kv_channels
    ffn = megatron_config.ffn_hidden_size // megatron_config.tensor_model_parallel_size
    activation = megatron_config.activation_func
    zero_centered = megatron_config.layernorm_zero_centered_gamma
    eps = megatron_config.layernorm_epsilon
    adjacent = megatron_config.rotary_interleaved
    cases = {
        "norm": (
            lambda x, weight: norm(x, weight, eps, zero_centered),
            [random(tokens, 1, width), random(width), random(tokens, 1, width)],
        ),
        "gate": (
            lambda x: gated(x, activation),
            [random(tokens, 1, 2 * ffn), random(tokens, 1, ffn)],
        ),
    }
    if megatron_config.num_moe_experts:
        cases["gate with weights"] = (
            lambda x, weights: gated(x, activation, weights),
            [random(tokens, 2 * ffn), random(tokens), random(tokens, ffn)],
        )
    for part, frequencies in (("", head // 2), (" of a part", head // 4)):
        angles = random(tokens, 1, 1, frequencies)
        table = of_channels(angles.cos(), angles.sin(), adjacent)
        if megatron_config.latent_heads or megatron_config.layer_heads:  # which norm and turn one by one
            cases[f"rotary embedding{part}"] = (
                lambda x, table=table: rotate(x, table[0], table[1], adjacent),
                [random(tokens, 1, 4, head), random(tokens, 1, 4, head)],
            )
            cases["norm of queries"] = (
                lambda x, weight: norm(x[..., :2, :], weight, eps, zero_centered),
                [random(tokens, 1, 2, 4, head), random(head), random(tokens, 1, 2, 2, head)],
            )
            continue
        weights = [random(head), random(head)] if megatron_config.qk_layernorm else []
        gates = bool(megatron_config.attention_output_gate)
        settings = HeadSettings(eps, zero_centered, False, adjacent, gates)
        cases[f"queries and keys{part}"] = (
            partial(_heads_side_by_side, table=table, settings=settings),
            [random(tokens, 1, 2, 4, head), *weights, random(tokens, 1, 8 * head)],
        )
    return cases


def _heads_side_by_side(
    rows: Tensor, *weights: Tensor, table: list[Tensor], settings: HeadSettings
) -> Tensor:
    heads = turned_heads(rows, weights or (None, None), [table], settings)
    return torch.cat([x.flatten(2) for x in heads], dim=-1)


# --- gradients of weights ---------------------------------------------------------------------------------


def weight_gradient_disagreement(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says to the user what is wrong with the sum of two micro batches' gradients on this device; None if
    nothing is. Products of two numbers of 16 bits are exact in fp32, so only the order of sums may differ."""
    random = _random(device, dtype)
    gradient_sum = torch.zeros(96, 64, device=device)
    expected = 0
    for _ in range(2):
        x = random(300, 64)
        grad = random(300, 96)
        try:
            wgrad_gemm_accum_fp32(x, grad, gradient_sum)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            touch(device, "the product that adds", error)
            return f"torch has no product that adds here ({_in_one_line(error)})"
        expected += grad.t().double() @ x.double()
    error = _difference(gradient_sum, expected)
    return None if error <= LARGEST[torch.float32] else f"they differ by {error:.1e}"


# --- products that exchange rows ---------------------------------------------------------------------------


def check_overlap(parallel: ParallelConfig, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Compares products that exchange rows, if a run has them, with products without an exchange.

    Collective. Raises ConfigError, on all ranks that share a layer."""
    if not (parallel.tp_comm_overlap and parallel.sequence_parallel):
        return
    group = parallel_state.get_tensor_model_parallel_group()
    try:
        error = overlap_error(group, width, device, dtype)
    except (RuntimeError, NotImplementedError) as problem:
        raise ConfigError(f"{OVERLAP} do not run here ({_in_one_line(problem)}); {WITHOUT}") from problem
    worst = torch.tensor(error, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    if not worst.item() <= LARGEST[dtype]:
        raise ConfigError(f"{OVERLAP} differ from plain ones by {worst.item():.1e}; {WITHOUT}")


def overlap_error(group: dist.ProcessGroup, width: int, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of results and gradients, of the largest number: on few rows and on many."""
    random, error = _random(device, dtype), 0.0
    for rows in (64, 2048):
        weight = random(256, width)
        back = random(width, 256)
        of_all = random(group.size() * rows, 1, width)
        gradient = random(group.size() * rows, 1, 256)
        rank_rows = slice(group.rank() * rows, (group.rank() + 1) * rows)
        results = _with_gradients(
            [of_all[rank_rows], weight, gradient], lambda x, w: GatheredProduct.apply(x, w, group)
        )
        results += _with_gradients(
            [gradient, back, of_all[rank_rows]], lambda x, w: ScatteredProduct.apply(x, w, group)
        )
        wide = [x.float() for x in (of_all, weight, back, gradient)]
        expected = _without_exchange(*wide, rank_rows, group.size())
        error = max(error, *map(_difference, results, expected))
    return error


def _without_exchange(
    of_all: Tensor, weight: Tensor, back: Tensor, gradient: Tensor, rank_rows: slice, ranks: int
) -> list[Tensor]:
    """The numbers that `overlap_error` expects. All ranks have the same, so sums over ranks are multiples."""
    flat = of_all.flatten(0, 1)
    flat_gradient = gradient.flatten(0, 1)
    gathered = [of_all @ weight.t(), ranks * (gradient @ weight)[rank_rows], flat_gradient.t() @ flat]
    # the gradient that scattered products get is of this rank's rows: the same rows of all ranks
    return [*gathered, ranks * (gradient @ back.t())[rank_rows], of_all @ back, flat.t() @ flat_gradient]


NOT_INSTALLED = (
    "Gated delta nets run in plain PyTorch, which is slower. `pip install 'megatron-vlm[gpu]'` brings "
    "flash-linear-attention, whose kernels take their place."
)


def check_delta_nets(megatron_config: TransformerConfig, device: torch.device, model: ModelConfig) -> None:
    """Lets gated delta nets use the package's kernels if it is installed and they agree with plain PyTorch.
    Raises ConfigError if they do not and `model.fallbacks` does not name delta_nets.

    A run in fp32 does without them, as they multiply in TF32, and so does a deterministic one: their tuning
    by time may choose other sums at the next start.
    """
    GatedDeltaNet.kernels = None
    heads = megatron_config.delta_heads
    dtype = megatron_config.params_dtype
    if heads is None or dtype == torch.float32 or torch.are_deterministic_algorithms_enabled():
        return
    try:
        kernel = installed_kernels()
    except ImportError as error:
        return fall_back("delta_nets", model, f"flash-linear-attention is not complete ({error})")
    if kernel is None:
        return warnings.warn(NOT_INSTALLED, stacklevel=2)
    tp, cp = megatron_config.tensor_model_parallel_size, megatron_config.context_parallel_size
    documents = Documents(np.array(DELTA_LENGTHS), device)

    def disagreements() -> list[str | None]:
        # documents that context parallelism cuts are there for fewer heads
        shared = [heads._replace(keys=heads.keys // n, values=heads.values // n) for n in {tp, tp * cp}]
        return [delta_disagreement(kernel, heads_of_rank, documents, dtype) for heads_of_rank in shared]

    # minutes, if Triton's cache does not have the kernels and the package's choice
    watchdog.beat("tuning the kernels of flash-linear-attention")
    problems = [problem for of_rank in local_rank_0_first(disagreements) for problem in of_rank if problem]
    watchdog.beat("building the model")
    if problems:
        return fall_back("delta_nets", model, problems[0])
    GatedDeltaNet.kernels = kernel


def delta_disagreement(
    by: Kernels, heads: DeltaHeads, documents: Documents, dtype: torch.dtype
) -> str | None:
    """Says to the user what is wrong with the kernels on this device; None if nothing is. Results and
    gradients are compared with plain PyTorch's in fp32 of the same numbers."""
    from triton import knobs  # where the kernels are, Triton is
    from triton.errors import TritonError

    knobs.runtime.jit_post_compile_hook = lambda **_: watchdog.beat()
    for name, function, tensors in delta_cases(heads, documents, dtype):
        plain = partial(function, documents=documents, by=None)
        expected = _with_gradients(_widened(tensors), plain)
        by_kernel = partial(function, documents=documents, by=by)
        errors = (*ERRORS, TritonError)
        if problem := problem_of("flash-linear-attention", by_kernel, tensors, expected, errors):
            return f"the {name} of flash-linear-attention {problem}"
    return None


def delta_cases(
    heads: DeltaHeads, documents: Documents, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[..., Tensor], list[Tensor]]]:
    """The functions with random tensors for them; the last is the gradient of the result. Decays are from
    weak ones to such that leave nothing."""
    random = _random(documents.device, dtype)
    tokens, channels, ratio = int(documents.lengths.sum()), heads.convolved, heads.values // heads.keys
    inputs, gradient = random(2, tokens, channels)
    weight = random(channels, heads.taps) / heads.taps
    yield "convolution", convolution, [inputs, weight, gradient]
    query, key = random(2, tokens, heads.keys, heads.key_channels)
    value, gradient = random(2, tokens, heads.keys, ratio, heads.value_channels)
    decay, beta = random(2, tokens, heads.keys, ratio)
    inputs = [query, key, value, -(2 * decay.float()).exp(), beta.sigmoid()]
    yield "rule", delta_rule, [*inputs, gradient]
