"""Products of linears that exchange rows while they multiply, for sequence parallelism (`tp_comm_overlap`).

torch has operators for this, on symmetric memory: a rank multiplies its own rows while the next rank's rows
arrive, and sends the rows of one rank while it multiplies the next rank's. On a CPU, and on shapes, torch's
stand-ins of the same signature exchange all rows at once. They add the parts of ranks as NCCL and gloo do; on
CUDA the operator adds them in fp32, in the order of ranks. It has not run on a GPU yet:
`models.layers.kernels.checks` compares it there before a run.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from megatron_vlm.parallel.operators import check
from megatron_vlm.parallel.weight_gradients import gradient_of, sum_for, wgrad_gemm_accum_fp32

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
