"""Megatron-Core on CPU: what asks for CUDA is answered; `test_layouts.py` trains in every layout."""

import torch

from megatron_vlm.parallel import cpu


def test_cuda_requests_are_answered_on_cpu():
    cpu.install()
    assert torch.empty(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"


def test_tensor_type_keeps_its_name_and_equals_cuda_name():
    cpu.install()
    name = torch.ones(2).type()
    assert str(name) == "torch.FloatTensor"
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.FloatTensor"]
    assert name != "torch.cuda.HalfTensor"
    assert torch.ones(2).type(torch.int64).dtype is torch.int64


def test_install_twice_patches_once():
    cpu.install()
    patched = torch.empty
    cpu.install()
    assert torch.empty is patched
