"""A look at flash-linear-attention's kernels before a run relies on them, as `kernels.checks` has it."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vlm.config import ModelConfig
from megatron_vlm.models.layers.attention_sizes import DeltaHeads
from megatron_vlm.models.layers.delta_net import kernels
from megatron_vlm.models.layers.delta_net.plan import Documents
from megatron_vlm.models.layers.kernels import checks

# of a real size, as the package tunes its kernels in their first call
LENGTHS = [*checks.MEASURED, *checks.DOCUMENTS]
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
    kernels.used = None
    heads = megatron_config.delta_heads
    dtype = megatron_config.params_dtype
    if heads is None or dtype == torch.float32 or torch.are_deterministic_algorithms_enabled():
        return
    try:
        kernel = kernels.installed()
    except ImportError as error:
        return checks.fall_back("delta_nets", model, f"flash-linear-attention is not complete ({error})")
    if kernel is None:
        return warnings.warn(NOT_INSTALLED, stacklevel=2)
    tp, cp = megatron_config.tensor_model_parallel_size, megatron_config.context_parallel_size
    for ranks in sorted({tp, tp * cp}):  # documents that context parallelism cuts are there for fewer heads
        shared = heads._replace(keys=heads.keys // ranks, values=heads.values // ranks)
        if problem := disagreement(kernel, shared, Documents(np.array(LENGTHS), device), dtype):
            return checks.fall_back("delta_nets", model, problem)
    kernels.used = kernel


def disagreement(
    by: kernels.Kernels, heads: DeltaHeads, documents: Documents, dtype: torch.dtype
) -> str | None:
    """Says to the user what is wrong with the kernels on this device; None if nothing is. Results and
    gradients are compared with plain PyTorch's in fp32 of the same numbers."""
    from triton.errors import TritonError  # where the kernels are, Triton is

    for name, function, tensors in cases(heads, documents, dtype):
        try:
            results = checks._with_gradients(tensors, partial(function, documents=documents, by=by))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, TritonError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            return f"the {name} of flash-linear-attention does not run here ({lines[0]})"
        wide = [x.float() for x in tensors]
        expected = checks._with_gradients(wide, partial(function, documents=documents, by=None))
        for error in map(checks._difference, results, expected):
            if not error <= checks.LARGEST[dtype]:
                return f"the {name} of flash-linear-attention differs by {error:.1e}"
    return None


def cases(
    heads: DeltaHeads, documents: Documents, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[..., Tensor], list[Tensor]]]:
    """The functions with random tensors for them; the last is the gradient of the result. Decays are from
    weak ones to such that leave nothing."""
    random = checks._random(documents.device, dtype)
    tokens, channels, ratio = int(documents.lengths.sum()), heads.convolved, heads.values // heads.keys
    inputs, gradient = random(2, tokens, channels)
    weight = random(channels, heads.taps) / heads.taps
    yield "convolution", kernels.convolution, [inputs, weight, gradient]
    query, key = random(2, tokens, heads.keys, heads.key_channels)
    value, gradient = random(2, tokens, heads.keys, ratio, heads.value_channels)
    decay, beta = random(2, tokens, heads.keys, ratio)
    inputs = [query, key, value, -(2 * decay.float()).exp(), beta.sigmoid()]
    yield "rule", kernels.delta_rule, [*inputs, gradient]
