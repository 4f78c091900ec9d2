"""Whole runs through the command line: killed and resumed they end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from programs import COMMAND, OUTSIDE_TORCHRUN, TYPED, Job, run_program, start_ranks
from run_results import figures, saved_tensors

from megatron_vlm.data.prepare import prepare_energon_dataset

pytestmark = pytest.mark.long  # `make test` has test_killed_saves
STEPS, SAVE_EVERY = 10, 5
ALONE_IN_TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}
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
            count = 3000 if number % 12 == 3 else rng.randrange(1, 20)  # the first are too long
            turns.append({"from": "gpt", "value": " ".join(rng.choices(words, k=count))})
            file.write(json.dumps({"id": f"r{number}", "images": images, "conversations": turns}) + "\n")
    prepare_energon_dataset(folder / "records.jsonl", folder / "energon", progress=False)
    return folder / "energon"


def words_of(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> list[str]:
    return [
        *("train", "--recipe", "gemma3_tiny_digits", "--run_dir", str(run_dir), "--hf_path", str(checkpoint)),
        *("--train_data_path", str(dataset), f"steps={STEPS}", f"save_every={SAVE_EVERY}", "warmup_steps=2"),
        *("micro_batch_size=2", "global_batch_size=4", "num_workers=2", "eval_every=5", *settings),
    ]


def start(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> Job:
    run_dir.mkdir(exist_ok=True)
    words = words_of(run_dir, checkpoint, dataset, *settings)
    return start_ranks(2, COMMAND, *words, log=run_dir / "log")


def rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run_dir) if "loss" in row}


def members(job: Job) -> list[psutil.Process]:
    """The ranks of a run and their workers."""
    ranks = [psutil.Process(rank.pid) for rank in job.ranks]
    return [worker for rank in ranks for worker in rank.children(recursive=True)] + ranks


def wait_for_step(step: int, run_dir: Path, job: Job) -> None:
    deadline = time.monotonic() + 200
    while step not in losses(run_dir):
        alive = all(rank.is_alive() for rank in job.ranks)
        assert alive and time.monotonic() < deadline, job.log.read_text()[-4000:]
        time.sleep(0.01)


def refused(run_dir: Path, words: list[str], **environment: str) -> str:
    """What a start in this folder says that ends at once and changes no file."""
    before = contents(run_dir)
    done = run_program(COMMAND, *words, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert contents(run_dir) == before
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill_after_step(step: int, run_dir: Path, job: Job) -> None:
    """SIGKILL to every process of the run once it logged `step` and has the checkpoint before it."""
    wait_for_step(step, run_dir, job)
    while not (run_dir / "checkpoints/latest").exists():
        assert all(rank.is_alive() for rank in job.ranks), job.log.read_text()[-4000:]
    for member in members(job):
        member.kill()
    for rank in job.ranks:
        rank.join()


@pytest.fixture(scope="module")
def runs(dataset, tiny_gemma3, tmp_path_factory) -> dict[str, Path | str]:
    """`whole` ran through, `resumed` was killed in step 7 or 8 of 10, `pp2` went on from there under PP2,
    `cp2` under CP2, and `cp2_killed` did so and was killed once more.

    `second` is what a second run said that was started while `whole` ran.
    """
    folder = tmp_path_factory.mktemp("runs")
    paths = {name: folder / name for name in ("whole", "resumed", "pp2", "cp2", "cp2_killed")}
    job = start(paths["whole"], tiny_gemma3, dataset)
    wait_for_step(1, paths["whole"], job)
    first = members(job)
    for member in first:
        member.suspend()  # so that it cannot end meanwhile
    (paths["whole"] / "errors/rank0.txt").write_text("of the first")
    alone = words_of(paths["whole"], tiny_gemma3, dataset, "tp=1")
    paths["second"] = refused(paths["whole"], alone, **ALONE_IN_TORCHRUN)
    for member in first:
        member.resume()
    job.finish()
    kill_after_step(SAVE_EVERY + 1, paths["resumed"], start(paths["resumed"], tiny_gemma3, dataset))
    for name in ("pp2", "cp2", "cp2_killed"):
        shutil.copytree(paths["resumed"], paths[name])
    start(paths["resumed"], tiny_gemma3, dataset).finish()
    start(paths["pp2"], tiny_gemma3, dataset, "tp=1", "pp=2").finish()
    start(paths["cp2"], tiny_gemma3, dataset, "tp=1", "cp=2").finish()
    kill_after_step(
        SAVE_EVERY + 2,
        paths["cp2_killed"],
        start(paths["cp2_killed"], tiny_gemma3, dataset, "tp=1", "cp=2"),
    )
    start(paths["cp2_killed"], tiny_gemma3, dataset, "tp=1", "cp=2").finish()
    return paths


def test_killed_and_resumed_has_the_losses_of_an_uninterrupted_run(runs):
    whole = losses(runs["whole"])
    assert sorted(whole) == list(range(1, STEPS + 1)) and len(set(whole.values())) == STEPS
    assert losses(runs["resumed"]) == whole


def test_killed_and_resumed_logs_the_same_figures_and_drops(runs):
    whole = figures(runs["whole"])
    assert whole[-2]["dropped_samples"] > 0 and "dropped_samples" in whole[-2]
    assert figures(runs["resumed"]) == whole
    last = [(runs[name] / "log").read_text().splitlines()[-1] for name in ("whole", "resumed")]
    assert last[0].startswith("dropped samples: ") and last[1] == last[0].replace("/whole/", "/resumed/")


def test_killed_and_resumed_ends_with_the_same_weights_and_moments(runs):
    whole, resumed = saved_tensors(runs["whole"], STEPS), saved_tensors(runs["resumed"], STEPS)
    assert len(whole) > 200 and whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_it_did_resume(runs):
    assert f"resumed after step {SAVE_EVERY}" in (runs["resumed"] / "log").read_text()


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(runs):
    """And the first went on: the tests above look at it."""
    assert f"{runs['whole']} belongs to a run that lives: process " in runs["second"]
    assert len(runs["second"].splitlines()) == 1


@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_a_tensor_parallel_run_goes_on_in_another_layout(runs, layout):
    whole, other = losses(runs["whole"]), losses(runs[layout])
    assert other.keys() == whole.keys()
    assert max(abs(other[step] - whole[step]) for step in whole) <= SAME_LOSS


def test_a_context_parallel_run_resumes_bit_for_bit(runs):
    assert losses(runs["cp2"]) == losses(runs["cp2_killed"])
    whole, killed = saved_tensors(runs["cp2"], STEPS), saved_tensors(runs["cp2_killed"], STEPS)
    assert whole.keys() == killed.keys() and all(torch.equal(killed[name], t) for name, t in whole.items())


def test_validation_loss_is_logged(runs):
    valid = [row["valid_loss"] for row in rows(runs["whole"]) if "valid_loss" in row]
    assert len(valid) == 2 and all(loss > 0 for loss in valid)


def test_a_run_resumed_on_fewer_cores_keeps_its_threads_and_bits(tiny_gemma3, dataset, tmp_path):
    """Two threads on all cores, then the same two on one core alone."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    given = {path: [*words_of(path, tiny_gemma3, dataset, "tp=1", "steps=8")] for path in (whole, resumed)}
    done = run_program(COMMAND, *given[whole], OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step_00000008")
    (resumed / "checkpoints/latest").write_text("step_00000005\n")
    environment = {name: value for name, value in OUTSIDE_TORCHRUN.items() if name != "OMP_NUM_THREADS"}
    command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *TYPED, *given[resumed]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "threads: 2, as the checkpoint has them" in done.stdout + done.stderr
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 8
