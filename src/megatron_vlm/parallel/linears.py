"""Megatron's parallel linears: without gradients, their products, and with communication overlapped.

Without gradients they do their product and collectives, and nothing else.

Megatron prepares at every call for the backward pass. Where a token at a time passes, in generation, this
takes longer on a CPU than a small product. The sums are the same.

Gradients of linears and of the head are added to Megatron's buffers by the product that computes them.
Otherwise each micro batch writes the gradient of every weight in 16 bits, reads it again and adds it.
Megatron takes the product from Apex, which has to be compiled; on CUDA torch has one, too. Experts' gradients
are added so where the host knows how many rows each expert has: with expert parallelism.

With `tp_comm_overlap` the products exchange rows while they multiply, by torch's operators on symmetric
memory: a rank multiplies its own rows while the next rank's rows arrive, and sends the rows of one rank
while it multiplies the next rank's. On a CPU, and on shapes, torch's stand-ins of the same signature
exchange all rows at once. On a GPU `models.layers.kernel_checks` compares it before a run.
"""

import sys
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric
from torch.nn.functional import grouped_mm, linear, pad


def difference(operators: dict[str, str], library: Any = torch.ops.aten) -> str | None:
    """Names the first operator that torch has with another argument, or has not; None if all are as given."""
    for name, arguments in operators.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(library, packet, None), overload or "default", None)
        expected_names = arguments.split()
        schema_arguments = operator._schema.arguments if operator else ()
        actual_names = [
            argument.name
            for argument in schema_arguments
            if argument.name in expected_names or not argument.has_default_value()
        ]
        for ours, other in zip_longest(expected_names, actual_names, fillvalue="nothing"):
            if ours != other:
                where = f"{library.name}.{name} of torch {torch.__version__}"
                return f"{where} has {other} where {ours} is given"
    return None


def check(operators: dict[str, str], library: Any = torch.ops.aten) -> None:
    """Raises ImportError that says which private operator is another one in this torch."""
    if changed := difference(operators, library):
        raise ImportError(f"{changed}; torch 2.11 to 2.15 work.")


DEVICES = ["cuda", "meta"]  # on which linears are built so; meta is what a rehearsal has for CUDA
in_product = True  # False: the check found torch's product wrong, and gradients are made first


def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor) -> None:
    """main_grad += grad_outputᵀ · input, in one kernel on CUDA. Name and arguments are Apex's."""
    dtype = main_grad_OI.dtype
    if not in_product:
        main_grad_OI.add_(grad_output_TO.t() @ input_TI)
        return
    if input_TI.device.type == "cpu":  # which has no such kernel
        input_TI, grad_output_TO = input_TI.to(dtype), grad_output_TO.to(dtype)
    wider = {} if input_TI.dtype == dtype else {"out_dtype": dtype}
    torch.addmm(main_grad_OI, grad_output_TO.t(), input_TI, **wider, out=main_grad_OI)


def sum_for(weight: Tensor) -> Tensor:
    """Where a backward pass adds the gradient of `weight`, in fp32 or wider: Megatron's buffer, or zeros."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    buffer = getattr(weight, "main_grad", None)
    return torch.zeros_like(weight, dtype=dtype) if buffer is None or buffer.dtype != dtype else buffer


def gradient_of(weight: Tensor, total: Tensor, of_rows: bool = False) -> Tensor | None:
    """The backward pass returns this. Megatron's hook leaves its buffer alone if the weight says so, but it
    wants a gradient, of no meaning. Of tied weights head and embedding add to one buffer: the embedding
    (`of_rows`) returns it, and the head, after which the embedding always comes, none."""
    if total is not getattr(weight, "main_grad", None):
        return total.to(weight.dtype)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight) if of_rows or not getattr(weight, "is_embedded", False) else None


class EmbeddedRows(torch.autograd.Function):
    """Rows (N, D) of a table (V, D), whose gradients are added to Megatron's buffer; a gradient of the whole
    table, of some GB, would be made and added for each micro batch."""

    @staticmethod
    def forward(ctx, table_VD: Tensor, ids_N: Tensor) -> Tensor:
        ctx.save_for_backward(table_VD, ids_N)
        return table_VD.index_select(0, ids_N)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        table_VD, ids_N = ctx.saved_tensors
        total = sum_for(table_VD)
        # on CUDA in a fixed order, unlike index_add_
        total.index_put_((ids_N,), grad_ND.to(total.dtype), accumulate=True)
        return gradient_of(table_VD, total, of_rows=True), None


def embedded(module: tensor_parallel.VocabParallelEmbedding, ids_T: Tensor) -> Tensor:
    """The embeddings (T, D) of tokens, under sequence parallelism of this rank's part of T."""
    if module.tp_group.size() == 1:
        return EmbeddedRows.apply(module.weight, ids_T)
    ids = ids_T - module.vocab_start_index
    is_elsewhere = (ids < 0) | (ids >= len(module.weight))
    rows = EmbeddedRows.apply(module.weight, ids.masked_fill(is_elsewhere, 0))
    rows = rows.masked_fill(is_elsewhere[:, None], 0)
    if module.reduce_scatter_embeddings:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows, group=module.tp_group)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=module.tp_group)


def _sum_of_shapes(*inputs: object, out: Tensor, **factors: object) -> Tensor:
    return out


# Torch 2.11 has no rule for shapes with `out_dtype`, and takes one in which the dtype is a factor.
SHAPES = torch.library.Library("aten", "IMPL")
SHAPES.impl("addmm.dtype_out", _sum_of_shapes, "Meta", allow_override=True)
wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # Apex's for buffers in 16 bits


def install() -> None:
    """Lets Megatron find the product here, in Apex's place. It is used where a config has
    `gradient_accumulation_fusion`, for weights that are trained."""
    layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
    layers._grad_accum_fusion_available = True


PRIVATE = {
    "fused_all_gather_matmul": "A Bs gather_dim group_name return_A",
    "fused_matmul_reduce_scatter": "A B reduce_op scatter_dim group_name",
}
check(PRIVATE, torch.ops.symm_mem)
gathered_product = torch.ops.symm_mem.fused_all_gather_matmul.default
scattered_product = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
STAND_INS = {
    gathered_product: symmetric._fused_all_gather_matmul_fallback,
    scattered_product: symmetric._fused_matmul_reduce_scatter_fallback,
}
ON_CPU = torch.library.Library("symm_mem", "IMPL")
for operator, stand_in in STAND_INS.items():
    ON_CPU.impl(operator.name().split("::")[1], stand_in, "CPU")


class Product(torch.autograd.Function):
    """(T, B, O): x (T, B, I) times its outputs' weights (O, I), of a single rank.

    Megatron's own function looks at each call for what there is to exchange, which takes the host longer.
    """

    @staticmethod
    def forward(ctx, x_TBI: Tensor, weight_OI: Tensor, adds: bool) -> Tensor:
        ctx.save_for_backward(x_TBI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.adds = adds
        return x_TBI @ weight_OI.t()

    @staticmethod
    def backward(ctx, grad_TBO: Tensor):
        x_TBI, weight_OI = ctx.saved_tensors
        grad_TBI = grad_TBO @ weight_OI
        if x_TBI is None:
            return grad_TBI, None, None
        x_RI = x_TBI.flatten(0, -2)
        grad_RO = grad_TBO.flatten(0, -2)
        if not ctx.adds:
            return grad_TBI, grad_RO.t() @ x_RI, None
        total = sum_for(weight_OI)
        wgrad_gemm_accum_fp32(x_RI, grad_RO, total)
        return grad_TBI, gradient_of(weight_OI, total), None


class GatheredProduct(torch.autograd.Function):
    """(T, B, O): rows of all ranks, x (t, B, I) on this one, times its outputs' weights (O, I)."""

    @staticmethod
    def forward(ctx, x_tBI: Tensor, weight_OI: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x_tBI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.group = group
        rows = x_tBI.contiguous()
        weights = [weight_OI.t()]
        return gathered_product(rows, weights, 0, group.group_name, return_A=False)[1][0]

    @staticmethod
    def backward(ctx, grad_TBO: Tensor):
        x_tBI, weight_OI = ctx.saved_tensors
        grad_TBO = grad_TBO.contiguous()
        if not ctx.needs_input_grad[1]:
            return scattered_product(grad_TBO, weight_OI, "sum", 0, ctx.group.group_name), None, None
        # As Megatron does: the rows are on their way beside the product for the input's gradient, and that
        # beside the product for the weights' gradient.
        x_TBI = x_tBI.new_empty(len(grad_TBO), *x_tBI.shape[1:])
        arriving = dist.all_gather_into_tensor(x_TBI, x_tBI.contiguous(), ctx.group, async_op=True)
        grad_TBI = grad_TBO.flatten(0, 1).mm(weight_OI).view_as(x_TBI)
        arriving.wait()
        grad_tBI = torch.empty_like(x_tBI, memory_format=torch.contiguous_format)
        leaving = dist.reduce_scatter_tensor(grad_tBI, grad_TBI, group=ctx.group, async_op=True)
        total = sum_for(weight_OI)
        wgrad_gemm_accum_fp32(x_TBI.flatten(0, 1), grad_TBO.flatten(0, 1), total)
        leaving.wait()
        return grad_tBI, gradient_of(weight_OI, total), None


class ScatteredProduct(torch.autograd.Function):
    """(t, B, O): this rank's rows of the sum over ranks of x (T, B, I) times their inputs' weights (O, I)."""

    @staticmethod
    def forward(ctx, x_TBI: Tensor, weight_OI: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x_TBI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.group = group
        return scattered_product(x_TBI.contiguous(), weight_OI.t(), "sum", 0, group.group_name)

    @staticmethod
    def backward(ctx, grad_tBO: Tensor):
        x_TBI, weight_OI = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        name = ctx.group.group_name
        grad_TBO, [grad_TBI] = gathered_product(grad_tBO.contiguous(), [weight_OI], 0, name, return_A=trained)
        if not trained:
            return grad_TBI, None, None
        total = sum_for(weight_OI)
        wgrad_gemm_accum_fp32(x_TBI.flatten(0, 1), grad_TBO.flatten(0, 1), total)
        return grad_TBI, gradient_of(weight_OI, total), None


ALIGNED = 8  # channels of a row in bf16, of which torch's grouped product on CUDA takes multiples alone
MOST_NUMBERS = 2**31 - 1  # of an operand with rows: its kernels count in 32 bits


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's linear without `gather_output`: each rank returns its part of the outputs."""

    def forward(self, input_: Tensor, *args) -> tuple[Tensor, Tensor | None]:
        if self.config.tp_comm_overlap and self.sequence_parallel and not self.explicit_expert_comm:
            return _with_bias(self, GatheredProduct.apply(input_, self.weight, self.tp_group))
        if self.tp_group.size() == 1 and not args:
            product = Product.apply(input_, self.weight, self.gradient_accumulation_fusion)
            return _with_bias(self, product)
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
        if self.tp_group.size() == 1:
            product = Product.apply(input_, self.weight, self.gradient_accumulation_fusion)
            return _with_bias(self, product)
        if torch.is_grad_enabled() or self.explicit_expert_comm:
            return super().forward(input_)
        output = linear(input_, self.weight)
        if self.sequence_parallel:
            output = tensor_parallel.reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        else:
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


def grouped_product(
    rows_ZI: Tensor, weights_XOI: Tensor, ends_X: Tensor, counts_X: list[int] | None = None
) -> Tensor:
    """Return (Z, O): rows times the weights of their expert; `ends_X` (int32) says where each one's rows end.

    If the host knows how many rows each has, `counts_X`, then each expert's product adds its gradient to
    Megatron's buffer, where that is in fp32.
    """
    if not len(rows_ZI):
        return rows_ZI @ weights_XOI[0].t()  # no row either, and zero as gradients
    if torch.is_grad_enabled():
        return GroupedProduct.apply(rows_ZI, weights_XOI, ends_X, counts_X)
    return _grouped(rows_ZI, weights_XOI, ends_X)


class GroupedProduct(torch.autograd.Function):
    """`grouped_product`. No grouped product of torch 2.15 adds, or returns fp32 for operands in 16 bits."""

    @staticmethod
    def forward(ctx, rows_ZI: Tensor, weights_XOI: Tensor, ends_X: Tensor, counts_X: list[int] | None):
        ctx.save_for_backward(rows_ZI if ctx.needs_input_grad[1] else None, weights_XOI, ends_X)
        ctx.counts_X = counts_X
        return _grouped(rows_ZI, weights_XOI, ends_X)

    @staticmethod
    def backward(ctx, grad_ZO: Tensor):
        rows_ZI, weights_XOI, ends_X = ctx.saved_tensors
        grad_ZO = grad_ZO.contiguous()
        grad_ZI = _grouped(grad_ZO, weights_XOI.mT, ends_X) if ctx.needs_input_grad[0] else None
        if rows_ZI is None:
            return grad_ZI, None, None, None
        buffer = getattr(weights_XOI, "main_grad", None)
        if ctx.counts_X is None or buffer is None or buffer.dtype != torch.float32:
            return grad_ZI, _grouped_gradient(grad_ZO, rows_ZI, ends_X), None, None
        experts = zip(rows_ZI.split(ctx.counts_X), grad_ZO.split(ctx.counts_X), buffer, strict=True)
        for rows, grad, total_OI in experts:
            if len(rows):
                wgrad_gemm_accum_fp32(rows, grad, total_OI)
        return grad_ZI, gradient_of(weights_XOI, buffer), None, None


def _grouped(rows_ZI: Tensor, weights_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """`grouped_product`. torch takes widths of 16 bytes alone: 8 channels in 16 bits; others are filled up
    with zeros, in a copy. More rows than it can count are multiplied in parts."""
    _, out, width = weights_XOI.shape
    if out % ALIGNED or width % ALIGNED:
        weights_XOI = pad(weights_XOI, (0, -width % ALIGNED, 0, -out % ALIGNED))
        rows_ZI = pad(rows_ZI, (0, -width % ALIGNED))
    parts = [
        grouped_mm(rows, weights_XOI.mT, offs=ends)
        for ends, rows in _parts(ends_X, MOST_NUMBERS // max(weights_XOI.shape[1:]), rows_ZI)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, :out]


def _grouped_gradient(grad_ZO: Tensor, rows_ZI: Tensor, ends_X: Tensor) -> Tensor:
    """(X, O, I): the gradient of experts' weights. That of one without rows is zero, whatever torch's product
    left in its place: not every kernel for GPUs writes it (pytorch #172439)."""
    out, width = grad_ZO.shape[1], rows_ZI.shape[1]
    grad_ZO, rows_ZI = (pad(x, (0, -x.shape[1] % ALIGNED)) for x in (grad_ZO, rows_ZI))
    total = None
    at_once = MOST_NUMBERS // max(grad_ZO.shape[1], rows_ZI.shape[1])
    for ends, grad, rows in _parts(ends_X, at_once, grad_ZO, rows_ZI):
        empty_X = ends.diff(prepend=ends.new_zeros(1)) == 0
        gradient = grouped_mm(grad.t(), rows, offs=ends).masked_fill_(empty_X[:, None, None], 0)
        total = gradient if total is None else total.add_(gradient)
    return total[:, :out, :width]


def _parts(ends_X: Tensor, at_once: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """At most so many rows at once, after where the experts' rows end in them."""
    for start in range(0, len(rows[0]), at_once):
        parts = [x[start : start + at_once] for x in rows]
        yield ends_X if len(rows[0]) <= at_once else (ends_X - start).clamp(0, len(parts[0])), *parts
