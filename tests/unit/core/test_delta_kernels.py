"""Gated delta nets by flash-linear-attention: its calls by a stand-in, its kernels in an interpreter."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fla_stand_in import STAND_IN
from triton import knobs

from megatron_vlm.config import ConfigError, ModelConfig
from megatron_vlm.job import watchdog
from megatron_vlm.models.layers import kernel_checks
from megatron_vlm.models.layers.attention_sizes import DeltaHeads
from megatron_vlm.models.layers.delta_net import GatedDeltaNet
from megatron_vlm.models.layers.delta_rule import Documents
from megatron_vlm.models.layers.kernel_checks import check_delta_nets, delta_disagreement

CPU = torch.device("cpu")
HEADS = DeltaHeads(keys=2, values=6, key_channels=16, value_channels=8, taps=4)
LENGTHS = [5, 1, 70, 64, 129, 63]
HOOKED = (
    "key",
    "repr",
    "fn",
    "compile",
    "is_manual_warmup",
    "already_compiled",
)  # arguments of Triton's hook


def documents(*lengths: int) -> Documents:
    return Documents(np.array(lengths, np.int64), CPU)


def test_the_calls_give_what_plain_pytorch_gives():
    assert delta_disagreement(STAND_IN, HEADS, documents(*LENGTHS), torch.float32) is None


def test_a_call_with_other_documents_is_seen():
    """The stand-in would go on across a document's beginning, as a kernel with wrong bounds."""
    wrong = documents(*LENGTHS)
    wrong.__dict__["number"] = documents(6, *LENGTHS[2:]).number  # of the reference
    assert "rule of flash-linear-attention differs" in delta_disagreement(
        STAND_IN, HEADS, wrong, torch.float32
    )


# -- the check before a run


def config(dtype: torch.dtype = torch.bfloat16, **sizes) -> SimpleNamespace:
    common = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "delta_heads": HEADS}
    return SimpleNamespace(**common | sizes, params_dtype=dtype)


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in as if it were installed, on short documents."""
    monkeypatch.setattr(GatedDeltaNet, "kernels", None)
    monkeypatch.setattr(kernel_checks, "installed_kernels", lambda: STAND_IN)
    monkeypatch.setattr(kernel_checks, "DELTA_LENGTHS", LENGTHS)
    monkeypatch.setattr(kernel_checks, "local_rank_0_first", lambda do: [do()])
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    return monkeypatch


def test_kernels_that_agree_are_used(stand_in, recwarn):
    check_delta_nets(config(), CPU, ModelConfig())
    assert GatedDeltaNet.kernels is STAND_IN and not recwarn.list
    check_delta_nets(config(torch.float32), CPU, ModelConfig())
    assert GatedDeltaNet.kernels is None  # also by a model that is built later


def test_each_kernel_that_is_tuned_is_a_heartbeat(stand_in):
    """Two for each check; and as many as Triton compiles, which calls its hook after each."""
    beats = []
    stand_in.setattr(watchdog, "beat", lambda doing=None: beats.append(doing))

    def compiling(*given, **named):
        for _ in range(100):  # as `JITFunction` does
            knobs.runtime.jit_post_compile_hook(**dict.fromkeys(HOOKED))
        return STAND_IN.rule(*given, **named)

    stand_in.setattr(kernel_checks, "installed_kernels", lambda: STAND_IN._replace(rule=compiling))
    check_delta_nets(config(), CPU, ModelConfig())
    assert beats[0] == "tuning the kernels of flash-linear-attention" and beats[-1] == "building the model"
    assert len(beats) >= 100


def test_triton_calls_the_hook_with_names():
    assert set(inspect.signature(knobs.JITHook.__call__).parameters) == {"self", *HOOKED}


def test_heads_are_checked_as_ranks_have_them(stand_in):
    seen = []
    stand_in.setattr(kernel_checks, "delta_disagreement", lambda by, heads, *_: seen.append(heads[:2]))
    heads = HEADS._replace(keys=8, values=24)
    check_delta_nets(
        config(tensor_model_parallel_size=2, context_parallel_size=2, delta_heads=heads), CPU, ModelConfig()
    )
    assert sorted(seen) == [(2, 6), (4, 12)]


def test_a_deterministic_run_has_no_kernel_that_is_tuned_by_time(stand_in):
    stand_in.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_delta_nets(config(), CPU, ModelConfig())
    assert GatedDeltaNet.kernels is None


def test_kernels_that_differ_end_the_run_or_plain_pytorch_takes_their_place(stand_in):
    def wrong(*given, **named):
        outputs, state = STAND_IN.rule(*given, **named)
        return outputs * 1.1, state

    stand_in.setattr(kernel_checks, "installed_kernels", lambda: STAND_IN._replace(rule=wrong))
    with pytest.raises(
        ConfigError, match=r"attention differs by .* model.fallbacks=\[delta_nets\] trains with"
    ):
        check_delta_nets(config(), CPU, ModelConfig())
    with pytest.warns(UserWarning, match="The run goes on with these in plain PyTorch"):
        check_delta_nets(config(), CPU, ModelConfig(fallbacks=["delta_nets"]))
    assert GatedDeltaNet.kernels is None


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_the_packages_own_kernels_agree_in_tritons_interpreter(dtype):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, Path(__file__).with_name("fla_interpreted.py"), dtype]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["None"]
