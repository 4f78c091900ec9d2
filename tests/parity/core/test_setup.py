"""Processes are laid out and seeded alike on every rank; tests of many ranks say what went wrong."""

import json
import os
import sys
from pathlib import Path

import pytest
from programs import OUTSIDE_TORCHRUN, ask, run_program

from megatron_vlm import cli
from megatron_vlm.config import ParallelConfig
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.layout import megatron_settings
from tiny.distributed import run_distributed


def test_interleaved_stages_send_one_by_one():
    assert megatron_settings(ParallelConfig(pp=2, vpp=2))["batch_p2p_comm"] is False
    assert megatron_settings(ParallelConfig(pp=2))["batch_p2p_comm"] is True


READ_BY_CUDA = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LAUNCH = """
import os, sys
from megatron_vlm.commands.arguments import prepare_cuda
from megatron_vlm.job.launch import launch
from megatron_vlm.config import ParallelConfig
prepare_cuda(ParallelConfig(tp=int(sys.argv[1])))
sys.exit(launch(2, sys.argv[2:], "printed_environment"))
"""


def environment_of_children(folder: Path, tp: int, **given: str) -> list[dict[str, str]]:
    helpers = os.pathsep.join(sys.path)
    ended = ask(sys.executable, "-c", LAUNCH, str(tp), str(folder), PYTHONPATH=helpers, **given)
    assert ended.returncode == 0, ended.stderr
    children = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return [{name: child[name] for name in READ_BY_CUDA if name in child} for child in children]


@pytest.mark.long
def test_children_of_the_launcher_have_what_cuda_and_torch_read(tmp_path):
    assert not OUTSIDE_TORCHRUN.keys() & set(READ_BY_CUDA)
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment_of_children(tmp_path, 1) == [allocator] * 2
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_of_children(tmp_path, 2, **own) == [own] * 2


@pytest.mark.parametrize("command", ["train", "import"])
def test_commands_set_it_before_they_start_ranks(tmp_path, tiny_gemma3, monkeypatch, command):
    for name in READ_BY_CUDA:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    seen = []
    monkeypatch.setattr(cli.arguments, "start_ranks", lambda *_: seen.append(dict(os.environ)) or 0)
    words = ["--recipe", "gemma3_vl_4b", "--nproc", "2", f"hf_path={tiny_gemma3}", f"run_dir={tmp_path}/run"]
    words += ["parallel.tp=2", "dataset_type=hf", f"train_data_path={rows}", "model.dtype=fp32"]
    with pytest.raises(SystemExit) as ended:
        cli.run(cli.app, "megatron-vlm", [command, *words])
    assert ended.value.code in (None, 0)
    assert seen[0]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "PYTORCH_ALLOC_CONF" in seen[0]


def _threads_that_import(path: str) -> tuple[list, int]:
    import threading

    from megatron_vlm.config import ModelConfig, RunConfig
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.opened import open_model
    from megatron_vlm.models.weights import importing

    asked = []
    importing.use_device = lambda device: asked.append((device.type, threading.get_ident()))
    setup.init_distributed(ParallelConfig(), 7)
    open_model(RunConfig(model=ModelConfig(hf_path=path, dtype="fp32")), open_source(path))
    setup.shutdown()
    return asked, threading.get_ident()


def test_every_thread_that_imports_weights_uses_the_process_device(tiny_gemma3):
    ((asked, main),) = run_distributed(1, _threads_that_import, str(tiny_gemma3))
    assert asked and {kind for kind, _ in asked} == {"cpu"} and main not in {thread for _, thread in asked}


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
        facts[-1]["cudnn_sdp"] = torch.backends.cuda.cudnn_sdp_enabled()
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
    # else PyTorch's attention plans each token of an answer anew on a Hopper card
    assert not any(fact["cudnn_sdp"] for rank in ranks for fact in rank)


def _turns() -> list[list[float]]:
    import time

    from megatron_vlm.parallel import setup

    def compiled() -> list[float]:
        began = time.monotonic()
        time.sleep(0.2)
        return [began, time.monotonic()]

    setup.init_distributed(ParallelConfig(), 7)
    turns = setup.local_rank_0_first(compiled)
    setup.shutdown()
    return turns


def test_what_one_rank_compiles_others_wait_for():
    for first, *others in run_distributed(3, _turns):
        assert all(began >= first[1] for began, _ in others)


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
