"""Processes are laid out and seeded alike on every rank; tests of many ranks say what went wrong."""

import pytest
from programs import run_program

from megatron_vlm.config import ParallelConfig
from megatron_vlm.parallel.layout import megatron_settings
from tiny.distributed import run_distributed


def test_interleaved_stages_send_one_by_one():
    assert megatron_settings(ParallelConfig(pp=2, vpp=2))["batch_p2p_comm"] is False
    assert megatron_settings(ParallelConfig(pp=2))["batch_p2p_comm"] is True


def _too_few() -> None:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(tp=4), 7)


def test_a_layout_that_needs_more_processes_is_refused():
    with pytest.raises(RuntimeError, match="tp 4 · pp 1 · cp 1 = 4 does not divide 1 process"):
        run_distributed(1, _too_few)


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


def test_a_single_process_needs_no_torchrun(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(
        "from megatron_vlm.parallel import setup; from megatron_vlm.config import ParallelConfig as P\n"
        "setup.init_distributed(P(), 1); print(setup.dist.get_world_size()); setup.shutdown()\n"
    )
    ended = run_program(program)
    assert ended.stdout.strip() == "1", ended.stderr


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
