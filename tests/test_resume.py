"""Whole runs through the command line: killed and resumed they end as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image
from torch.distributed.checkpoint import FileSystemReader

from megatron_vlm.data.prepare import prepare_energon_dataset

STEPS, SAVE_EVERY = 10, 5
SAME_LOSS = 1e-5  # between layouts; the worst seen is 3e-7


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Sixty short conversations about 0, 1 or 2 noise images."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    words = "the cat a dog shows two people on the table near the sofa".split()
    with open(folder / "records.jsonl", "w") as file:
        for number in range(60):
            images = [f"{number}_{i}.jpg" for i in range(number % 3)]
            for name in images:
                pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name)
            question = "<image>" * len(images) + " ".join(rng.choices(words, k=rng.randrange(3, 12)))
            turns = [{"from": "human", "value": question}]
            turns.append({"from": "gpt", "value": " ".join(rng.choices(words, k=rng.randrange(1, 20)))})
            file.write(json.dumps({"id": f"r{number}", "images": images, "conversations": turns}) + "\n")
    prepare_energon_dataset(folder / "records.jsonl", folder / "energon", progress=False)
    return folder / "energon"


def start(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatron_vlm.cli", "train", "--recipe", "gemma3_tiny_digits"]
    command += ["--nproc", "2", "--run_dir", str(run_dir), "--hf_path", str(checkpoint)]
    command += [
        "--train_data_path",
        str(dataset),
        f"steps={STEPS}",
        f"save_every={SAVE_EVERY}",
        "warmup_steps=2",
    ]
    command += ["micro_batch_size=2", "global_batch_size=4", "num_workers=2", "eval_every=5", *settings]
    run_dir.mkdir(exist_ok=True)
    log = open(run_dir / "log", "a")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finish(run_dir: Path, process: subprocess.Popen) -> None:
    assert process.wait(timeout=300) == 0, (run_dir / "log").read_text()[-4000:]


def rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run_dir) if "loss" in row}


def kill_after_step(step: int, run_dir: Path, process: subprocess.Popen) -> None:
    """SIGKILL to every process of the run (torchrun's are in sessions of their own) once it logged `step`."""
    deadline = time.monotonic() + 200
    while step not in losses(run_dir):
        assert process.poll() is None and time.monotonic() < deadline, (run_dir / "log").read_text()[-4000:]
        time.sleep(0.01)
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        member.kill()
    process.wait()


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the last checkpoint: parameters and Adam's moments."""
    reader = FileSystemReader(run_dir / "checkpoints" / f"step_{STEPS:08d}")
    stored = reader.read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(meta.size) for name, meta in stored if hasattr(meta, "size")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.fixture(scope="module")
def runs(dataset, tiny_gemma3, tmp_path_factory) -> dict[str, Path]:
    """`whole` ran through, `resumed` was killed in step 7 or 8 of 10, `pp2` went on from there under PP2."""
    folder = tmp_path_factory.mktemp("runs")
    paths = {name: folder / name for name in ("whole", "resumed", "pp2")}
    process = start(paths["whole"], tiny_gemma3, dataset)
    finish(paths["whole"], process)
    killed = start(paths["resumed"], tiny_gemma3, dataset)
    kill_after_step(SAVE_EVERY + 1, paths["resumed"], killed)
    shutil.copytree(paths["resumed"], paths["pp2"])
    finish(paths["resumed"], start(paths["resumed"], tiny_gemma3, dataset))
    finish(paths["pp2"], start(paths["pp2"], tiny_gemma3, dataset, "tp=1", "pp=2"))
    return paths


def test_killed_and_resumed_has_the_losses_of_an_uninterrupted_run(runs):
    whole = losses(runs["whole"])
    assert sorted(whole) == list(range(1, STEPS + 1)) and len(set(whole.values())) == STEPS
    assert losses(runs["resumed"]) == whole


def test_killed_and_resumed_logs_every_step_once(runs):
    steps = [row["step"] for row in rows(runs["resumed"]) if "loss" in row]
    assert steps == list(range(1, STEPS + 1))


def test_killed_and_resumed_ends_with_the_same_weights_and_moments(runs):
    whole, resumed = tensors(runs["whole"]), tensors(runs["resumed"])
    assert len(whole) > 200 and whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_it_did_resume(runs):
    assert f"resumed after step {SAVE_EVERY}" in (runs["resumed"] / "log").read_text()


def test_a_tensor_parallel_run_goes_on_in_a_pipeline(runs):
    whole, pp2 = losses(runs["whole"]), losses(runs["pp2"])
    assert pp2.keys() == whole.keys()
    assert max(abs(pp2[step] - whole[step]) for step in whole) <= SAME_LOSS


def test_validation_loss_is_logged(runs):
    valid = [row["valid_loss"] for row in rows(runs["whole"]) if "valid_loss" in row]
    assert len(valid) == 2 and all(loss > 0 for loss in valid)
