"""Norms with Megatron's constructor, and Gemma's norm after a sub-layer."""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vlm.models.layers.kernels.fused import norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, with statistics in fp32.

    With `layernorm_zero_centered_gamma` the weight is an offset from one and is applied in fp32 before the
    cast back, as one without offset with `wide_norms`; otherwise after the cast. Transformers does the same
    (Gemma3RMSNorm, Gemma4RMSNorm, LlamaRMSNorm). Sequence parallelism sums the weight's gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.wide = getattr(config, "wide_norms", False)
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps, self.zero_centered, self.wide)


class NormThenAdd(nn.Module):
    """residual + norm(sub-layer output), in place of Megatron's bias-dropout-add."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        return residual + self.norm(output if bias is None else output + bias)
