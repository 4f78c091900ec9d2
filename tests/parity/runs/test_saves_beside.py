"""Checkpoints that a thread writes while training goes on: they hold the step of which they are."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time

import launches
import torch.distributed as dist
from sources import write_sharegpt

from megatron_vlm import run_folder
from megatron_vlm.callbacks import Callback
from megatron_vlm.callbacks.checkpoints import CheckpointWriter
from megatron_vlm.config import ParallelConfig
from megatron_vlm.parallel import setup
from megatron_vlm.recipes import compose
from megatron_vlm.training.loop import train
from tiny.distributed import run_distributed


def _writer(root: str):
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), 1)
    run = launches._start("dp", seed=1)
    config = launches.run_config("dp")
    config.run_dir = root
    return run, CheckpointWriter(config, *run)


def _train_meanwhile(root: str) -> dict:
    """On a slow disk: training changes tensors, schedule and generators while they are written."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint

    run, writer = _writer(root)
    launches._train(run, [0, 1])
    on_disk = os.fsync
    os.fsync = lambda file: (time.sleep(0.2), on_disk(file))
    writer.save(2, {"rank": dist.get_rank()}, {"said": "two"})
    at_save = launches._digest(run), launches._draws()
    launches._train(run, [2, 3])
    writer.check()
    meanwhile = run_folder.latest_checkpoint(root)
    at_end = launches._digest(run)
    writer.save(4, {"rank": dist.get_rank()}, {})  # waits for the other
    between = run_folder.latest_checkpoint(root)
    writer.close()
    (run_folder.checkpoints(root) / "latest").write_text("step_00000002\n") if dist.get_rank() == 0 else None
    setup.on_first_rank(list)
    again = launches._start("dp", seed=9)
    state = checkpoint.load_latest(root, *again)
    loaded = launches._digest(again), launches._draws()
    launches._train(again, [2, 3])
    return {
        "meanwhile": str(meanwhile),
        "between": str(between),
        "same": loaded == at_save,
        "ends": launches._digest(again) == at_end != at_save[0],
        "state": [state.step, state.extra, state.loader_states],
    }


def test_a_checkpoint_holds_its_step_although_training_goes_on(tmp_path):
    for found in run_distributed(2, _train_meanwhile, str(tmp_path)):
        assert found["meanwhile"] == "None" and found["between"].endswith("step_00000002")
        assert found["same"] and found["ends"]
        assert found["state"] == [2, {"said": "two"}, [{"rank": 0}, {"rank": 1}]]


def _full_disk(root: str) -> dict:

    run, writer = _writer(root)
    launches._train(run, [0])
    writer.save(1, {}, {})
    writer.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk: the write fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    writer.save(2, {}, {})
    error, steps = "", 0
    while not error and steps < 1000:
        launches._train(run, [1 + steps])
        steps += 1
        try:
            writer.check()
        except OSError as failure:
            error = str(failure)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(os.listdir(run_folder.checkpoints(root)))
    writer.save(3, {}, {})
    writer.close()
    return {"error": error, "left": left, "then": run_folder.latest_checkpoint(root).name}


def test_what_fails_beside_training_ends_it_with_the_same_words(tmp_path):
    (found,) = run_distributed(1, _full_disk, str(tmp_path))
    assert str(tmp_path) in found["error"] and "OSError" in found["error"]
    assert found["error"].endswith("make room (a quota and `ulimit -f` count, too) and start again.")
    assert found["left"] == ["latest", "step_00000001"] and found["then"] == "step_00000003"


class Moves(Callback):
    """Takes each checkpoint away, as a callback does that copies it and keeps none here."""

    def __init__(self):
        self.saved: list[tuple[int, bool]] = []

    def on_save(self, run, checkpoint):
        step = int(checkpoint.name.removeprefix("step_"))
        self.saved.append((step, (checkpoint / "state.json").is_file()))
        assert run.step >= step
        dist.barrier()  # until every rank has looked
        setup.on_first_rank(shutil.rmtree, checkpoint)


def _train_and_move(root: str, checkpoint: str) -> dict[str, list]:
    saved = {}
    for beside in ("true", "false"):
        settings = ["steps=8", "tp=1", "micro_batch_size=1", "global_batch_size=2", "num_workers=0"]
        settings += ["data.dataset_type=hf", "train.save_every=3", f"train.async_save={beside}"]
        paths = {
            "run_dir": f"{root}/{beside}",
            "hf_path": checkpoint,
            "train_data_path": f"{root}/data.jsonl",
        }
        callback = Moves()
        train(compose("gemma3_tiny_digits", settings=settings, arguments=paths), callbacks=[callback])
        saved[beside] = callback.saved
    return saved


def test_callbacks_hear_of_a_checkpoint_that_is_there_and_may_take_it_away(tmp_path, tiny_gemma3):
    write_sharegpt(tmp_path, 8)
    ranks = run_distributed(2, _train_and_move, str(tmp_path), str(tiny_gemma3))
    expected = [(3, True), (6, True), (8, True)]
    assert ranks == [{"true": expected, "false": expected}] * 2
