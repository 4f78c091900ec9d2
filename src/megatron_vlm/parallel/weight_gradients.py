"""Gradients of Megatron's linears, added to its fp32 buffers by the product that computes them.

Otherwise each micro batch writes the gradient of every weight in 16 bits, reads it again and adds it.
Megatron takes the product from Apex, which has to be compiled; on CUDA torch has one, too. It has not run on
a GPU yet: `models.layers.kernel_checks` compares it there before a run.
"""

from __future__ import annotations

import sys

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

DEVICES = ["cuda"]  # the types of device on which linears are built so


def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor) -> None:
    """main_grad += grad_outputᵀ · input, in one kernel on CUDA. Name and arguments are Apex's."""
    if input_TI.dtype == main_grad_OI.dtype:
        main_grad_OI.addmm_(grad_output_TO.t(), input_TI)
    elif input_TI.device.type == "cpu":  # which has no such kernel
        main_grad_OI.addmm_(grad_output_TO.t().float(), input_TI.float())
    else:
        torch.addmm(
            main_grad_OI, grad_output_TO.t(), input_TI, out_dtype=main_grad_OI.dtype, out=main_grad_OI
        )


def install() -> None:
    """Lets Megatron find the product here, in Apex's place. It is used where a config has
    `gradient_accumulation_fusion`, for weights that are trained."""
    layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
    layers._grad_accum_fusion_available = True
