"""`train.deterministic`: torch is told, and which operations of a step would refuse it on CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from rehearsals import config_of, run_of
from torch.utils._pytree import tree_leaves

from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import describe
from tiny.checkpoints import TINY_FAMILIES

# ATen's operations that raise on CUDA under `use_deterministic_algorithms` (its documentation, torch 2.11 and
# 2.15); cumsum only of floats, put_ only where it does not add
RAISES = set(
    """adaptive_avg_pool3d_backward adaptive_max_pool2d_backward _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward avg_pool3d_backward bincount _ctc_loss_backward
    cumsum fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward
    grid_sampler_3d_backward histc index_reduce kthvalue max_pool3d_with_indices_backward max_unpool2d
    max_unpool3d median nll_loss2d_forward nll_loss2d_backward put put_ reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward scatter_reduce upsample_linear1d_backward upsample_bilinear2d_backward
    upsample_bicubic2d_backward upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa_backward""".split()
)
# towers whose learned positions Transformers resizes; without gradients if model.freeze has the tower
REFUSED = dict.fromkeys(("glm4v", "glm46v", "glmga", "glm4v_moe"), {"grid_sampler_2d_backward"})
REFUSED["llava_onevision"] = {"upsample_bilinear2d_backward"}  # of large images
QUICK = ("gemma3", "qwen3_vl_moe")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in TINY_FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_a_step_on_a_gpu_repeat_but_for_those_that_are_named(family, monkeypatch):
    from megatron_vlm.extras.plan.recorder import Recorder
    from megatron_vlm.extras.plan.rehearsal import rehearse

    seen = set()
    dispatch = Recorder.__torch_dispatch__

    def noting(self, func, types, args=(), kwargs=None):
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor) and each.is_meta]
        if tensors and (func._opname != "cumsum" or tensors[0].is_floating_point()):
            seen.add(func._opname)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", noting)
    run = run_of(ParallelConfig())
    run.model.dtype, run.model.attention, run.train.global_batch_size = "bf16", "auto", 2
    rehearse(run, describe(config_of(family)), 1)
    assert {"_fused_adamw_", "embedding_dense_backward"} <= seen
    assert any(name.endswith(("attn_backward", "flash_attention_backward")) for name in seen)
    assert seen & RAISES == REFUSED.get(family, set())


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampling_does_nothing_on_a_gpu_that_torch_would_refuse(top_p, monkeypatch):
    from megatron_vlm.extras.plan.recorder import META, Recorder
    from megatron_vlm.generation.sampling import Sampling
    from megatron_vlm.parallel import setup

    refused = []

    class OnShapes(Recorder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            if func._opname in RAISES and any(each.is_meta for each in given):
                refused.append(func._opname)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with setup.pretend_rank(ParallelConfig(), 1), OnShapes():
        Sampling(1.0, top_p, seed=1).choose(torch.empty(3, 50, device=META), np.full(3, 0.5))
    assert refused == []


TOLD = """
import json, os, torch
from megatron_vlm.config import ParallelConfig
from megatron_vlm.parallel import setup
setup.init_distributed(ParallelConfig(), 1, deterministic=True)
print(json.dumps([torch.are_deterministic_algorithms_enabled(),
    torch.is_deterministic_algorithms_warn_only_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"]]))
"""


@pytest.mark.long
@pytest.mark.parametrize("given", [None, ":16:8"])
def test_torch_and_cublas_are_told(given):
    environment = dict(os.environ) | ({"CUBLAS_WORKSPACE_CONFIG": given} if given else {})
    said = subprocess.run([sys.executable, "-c", TOLD], env=environment, capture_output=True, check=True)
    assert json.loads(said.stdout) == [True, False, given or ":4096:8"]
