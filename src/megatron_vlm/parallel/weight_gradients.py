"""Gradients of linears and of the head, added to Megatron's buffers by the product that computes them.

Otherwise each micro batch writes the gradient of every weight in 16 bits, reads it again and adds it.
Megatron takes the product from Apex, which has to be compiled; on CUDA torch has one, too. It has not run on
a GPU yet: `models.layers.kernels.checks` compares it there before a run.
"""

import sys

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

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


def gradient_of(weight: Tensor, total: Tensor) -> Tensor | None:
    """The backward pass returns this. Megatron's hook leaves its buffer alone if the weight says so, but it
    wants a gradient; where the weight is the embedding, too (`zero_out_wgrad`), the embedding gives one."""
    if total is not getattr(weight, "main_grad", None):
        return total.to(weight.dtype)
    weight.grad_added_to_main_grad = True
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


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
