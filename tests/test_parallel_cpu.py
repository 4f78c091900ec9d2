"""Megatron-Core on CPU: every layout computes what a single process computes."""

import launches
import pytest
import torch

from megatron_vlm.parallel import cpu

LAYOUTS = [
    (2, "dp"),
    (2, "dp_plain"),
    (2, "tp"),
    (2, "tp_no_sp"),
    (2, "pp"),
    (2, "pp_plain"),
    (2, "vpp"),
    pytest.param(4, "tp_pp", marks=pytest.mark.long),
    (2, "moe_ep"),
    pytest.param(4, "moe_tp_ep", marks=pytest.mark.long),
]
LOSS_TOLERANCE = 1e-5


@pytest.mark.parametrize(("world_size", "case"), LAYOUTS)
def test_losses_of_ten_steps_equal_single_process(world_size, case):
    reference = "moe_dp" if case.startswith("moe") else "dp"
    expected = launches.first(1)[0][reference]["losses"]
    for rank in launches.first(world_size):
        assert rank[case]["losses"] == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_training_changes_the_loss():
    """Without this the comparisons above could hold for a model that never moves."""
    losses = launches.first(1)[0]["dp"]["losses"]
    assert max(losses) - min(losses) > 1e-2


def test_bf16_trains_in_bf16():
    bf16, fp32 = (launches.first(2)[0][case]["losses"] for case in ("dp_bf16", "dp"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, abs=0.05)


def test_cuda_requests_are_answered_on_cpu():
    cpu.install()
    assert torch.empty(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.ones(2).to("cuda:0").device.type == "cpu"
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
