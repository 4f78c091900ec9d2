"""A layout that cannot run is refused before anything is built; one that can is set up on every rank."""

import subprocess
import sys

import pytest

from megatron_vlm.config import ParallelConfig
from megatron_vlm.parallel.layout import (
    LayoutLimits,
    check_layout,
    data_parallel_size,
    megatron_settings,
    sequence_parallel,
)
from megatron_vlm.testing.distributed import run_distributed


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        (
            ParallelConfig(tp=2, pp=2, cp=3),
            16,
            "parallel: tp 2 · pp 2 · cp 3 = 12 does not divide 16 processes; "
            "change one size or start 12 or 24.",
        ),
        (ParallelConfig(tp=4), 2, "tp 4 · pp 1 · cp 1 = 4 does not divide 2 processes; .* start 4."),
        (ParallelConfig(ep=3), 4, "tp 1 · ep 3 · pp 1 = 3 does not divide 4 processes"),
        (ParallelConfig(pp=0), 1, "pp 0 is not a size"),
        (ParallelConfig(vpp=2), 1, "vpp 2 needs a pipeline, pp is 1"),
        (ParallelConfig(sp=True), 1, "sp true needs tensor parallelism, tp is 1"),
        (ParallelConfig(tp=2, ep=2, sp=False), 4, "tp 2 · ep 2 needs sequence parallelism"),
    ],
)
def test_bad_layout_names_values_and_remedy(parallel, world_size, message):
    with pytest.raises(ValueError, match=message):
        check_layout(parallel, world_size)


@pytest.mark.parametrize(
    ("parallel", "limits", "message"),
    [
        (ParallelConfig(pp=2, vpp=2), LayoutLimits(num_layers=6), "= 4 stages do not divide the model's 6"),
        (ParallelConfig(tp=4), LayoutLimits(num_heads=6), "tp 4 does not divide the model's 6 heads"),
        (ParallelConfig(tp=4), LayoutLimits(num_kv_heads=3), "tp 4 and the model's 3 key/value heads"),
        (ParallelConfig(ep=4), LayoutLimits(num_experts=6), "ep 4 does not divide the model's 6 experts"),
        (ParallelConfig(ep=4), LayoutLimits(num_layers=4), "ep 4, but the model has no experts"),
    ],
)
def test_layout_that_does_not_fit_the_model(parallel, limits, message):
    with pytest.raises(ValueError, match=message):
        check_layout(parallel, 4, limits)


def test_good_layouts_pass():
    limits = LayoutLimits(num_layers=8, num_heads=8, num_kv_heads=2, num_experts=4)
    for parallel in (ParallelConfig(), ParallelConfig(tp=4), ParallelConfig(tp=2, ep=4, pp=2, vpp=2)):
        check_layout(parallel, 16, limits)


def test_sequence_parallel_follows_tp_until_told():
    assert [sequence_parallel(ParallelConfig(tp=tp)) for tp in (1, 2)] == [False, True]
    assert not sequence_parallel(ParallelConfig(tp=2, sp=False))


def test_data_parallel_size_is_what_is_left():
    assert data_parallel_size(ParallelConfig(tp=2, pp=2, cp=2), 16) == 2


def test_interleaved_stages_send_one_by_one():
    assert megatron_settings(ParallelConfig(pp=2, vpp=2))["batch_p2p_comm"] is False
    assert megatron_settings(ParallelConfig(pp=2))["batch_p2p_comm"] is True


def test_layouts_are_checked_without_torch():
    code = "import sys, megatron_vlm.parallel.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def _facts(layouts: list[ParallelConfig]) -> list[dict]:
    import random

    import numpy as np
    import torch
    from megatron.core import parallel_state as ps

    from megatron_vlm.parallel import setup

    setup.init_distributed(layouts[0], 7)
    facts = []
    for parallel in layouts:
        setup.reset_layout(parallel, 7)
        ranks = {
            "tp": ps.get_tensor_model_parallel_rank(),
            "pp": ps.get_pipeline_model_parallel_rank(),
            "dp": ps.get_data_parallel_rank(),
        }
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        facts.append({**ranks, "draws": draws, "device": str(setup.device())})
    setup.shutdown()
    return facts


def test_layouts_follow_one_another_in_the_same_processes():
    ranks = run_distributed(2, _facts, [ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2)])
    dp, tp, pp = ([rank[i] for rank in ranks] for i in range(3))
    assert [fact["dp"] for fact in dp] == [0, 1]
    assert [fact["tp"] for fact in tp] == [0, 1]
    assert [fact["pp"] for fact in pp] == [0, 1]
    assert dp[0]["draws"] == dp[1]["draws"] == tp[0]["draws"] == tp[1]["draws"]
    assert pp[0]["draws"] != pp[1]["draws"]  # stages hold other weights


def _alone() -> str:
    code = (
        "from megatron_vlm.parallel import setup; from megatron_vlm.config import ParallelConfig as P\n"
        "setup.init_distributed(P(), 1); print(setup.dist.get_world_size()); setup.shutdown()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_single_process_needs_no_torchrun():
    assert _alone().strip() == "1"


def _fails_on_rank_1() -> None:
    import os
    import time

    if os.environ["RANK"] == "1":
        raise KeyError("what rank 1 did not find")
    time.sleep(600)


def test_run_distributed_shows_the_failing_rank_and_ends_the_others():
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of 2 failed") as caught:
        run_distributed(2, _fails_on_rank_1)
    assert "KeyError: 'what rank 1 did not find'" in str(caught.value)


def _sleeps() -> None:
    import time

    time.sleep(600)


def test_run_distributed_ends_at_its_timeout():
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 1 still run after 2 s"):
        run_distributed(1, _sleeps, timeout=2)
