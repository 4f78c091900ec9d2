"""Megatron's parallel linears, which without gradients do their product and collectives, and nothing else.

Megatron prepares at every call for the backward pass. Where a token at a time passes, in generation, this
takes longer on a CPU than a small product. The sums are the same.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, pad

from megatron_vlm.parallel.overlapped import GatheredProduct, ScatteredProduct

ALIGNED = 8  # channels of a row in bf16, of which torch's grouped product on CUDA takes multiples alone
MOST_NUMBERS = 2**31 - 1  # of an operand with rows: its kernels count in 32 bits


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's linear without `gather_output`: each rank returns its part of the outputs."""

    def forward(self, input_: Tensor, *args) -> tuple[Tensor, Tensor | None]:
        if self.config.tp_comm_overlap and self.sequence_parallel and not self.explicit_expert_comm:
            return _with_bias(self, GatheredProduct.apply(input_, self.weight, self.tp_group))
        if torch.is_grad_enabled() or self.explicit_expert_comm or args:
            return super().forward(input_, *args)
        if self.sequence_parallel:
            input_ = tensor_parallel.gather_from_sequence_parallel_region(input_, group=self.tp_group)
        return _with_bias(self, linear(input_, self.weight))


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Megatron's linear with `input_is_parallel`: each rank has its part of the inputs."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.config.tp_comm_overlap and self.sequence_parallel and not self.explicit_expert_comm:
            return _with_bias(self, ScatteredProduct.apply(input_, self.weight, self.tp_group))
        if torch.is_grad_enabled() or self.explicit_expert_comm:
            return super().forward(input_)
        output = linear(input_, self.weight)
        if self.sequence_parallel:
            output = tensor_parallel.reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        elif self.tp_group.size() > 1:
            output = tensor_parallel.reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        return _with_bias(self, output)


class BiasedRowParallelLinear(RowParallelLinear):
    """For attention only; Megatron's `add_bias_linear` would give feed-forwards biases, too."""

    def __init__(self, *args, bias: bool, **kwargs):
        super().__init__(*args, bias=True, **kwargs)


class WholeLinear(torch.nn.Linear):
    """A linear that is whole on every rank of tensor parallelism. Under sequence parallelism it sees the
    rank's own tokens."""

    def __init__(self, width: int, out: int, config: TransformerConfig, bias: bool = False):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(width, out, bias=bias, device=device, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            config.init_method(self.weight)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        """Every rank's copy is known as one, also in modules that pass no group on."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, sharded_offsets=sharded_offsets)


def _with_bias(module: torch.nn.Module, output: Tensor) -> tuple[Tensor, Tensor | None]:
    if module.skip_bias_add:
        return output, module.bias
    return (output if module.bias is None else output + module.bias), None


def grouped_product(rows_ZI: Tensor, weights_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """(Z, O): rows times the weights of their expert. torch takes widths of 16 bytes alone: 8 channels in 16
    bits; others are filled up with zeros, in a copy. More rows than it can count are multiplied in parts."""
    _, out, width = weights_XOI.shape
    if not len(rows_ZI):
        return rows_ZI @ weights_XOI[0].t()  # no row either, and zero as gradients
    if out % ALIGNED or width % ALIGNED:
        weights_XOI = pad(weights_XOI, (0, -width % ALIGNED, 0, -out % ALIGNED))
        return grouped_product(pad(rows_ZI, (0, -width % ALIGNED)), weights_XOI, ends_X)[:, :out]
    rows_at_once = MOST_NUMBERS // max(out, width)
    if not torch.is_grad_enabled() and len(rows_ZI) <= rows_at_once:
        return grouped_mm(rows_ZI, weights_XOI.mT, offs=ends_X)
    parts = []
    for start, rows in zip(range(0, len(rows_ZI), rows_at_once), rows_ZI.split(rows_at_once), strict=True):
        ends = ends_X if len(rows) == len(rows_ZI) else (ends_X - start).clamp(0, len(rows))
        parts.append(grouped_mm(rows, ZeroWithoutRows.apply(weights_XOI, ends).mT, offs=ends))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ZeroWithoutRows(torch.autograd.Function):
    """Experts' weights. The gradient of one without rows is zero, whatever torch's product left in its place:
    not every kernel for GPUs writes it (pytorch #172439)."""

    @staticmethod
    def forward(ctx, weights_XOI: Tensor, ends_X: Tensor) -> Tensor:
        ctx.ends_X = ends_X
        return weights_XOI.view_as(weights_XOI)

    @staticmethod
    def backward(ctx, gradient_XOI: Tensor):
        empty_X = ctx.ends_X.diff(prepend=ctx.ends_X.new_zeros(1)) == 0
        return gradient_XOI.masked_fill_(empty_X[:, None, None], 0), None
