"""A short run by the command line, as its user starts it: launcher, data workers, saves beside training,
SIGTERM in the middle, and the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from places import ROOT

from gpu_check.rows import LOG_TAIL, Row
from gpu_check.sizes import NAME, ON_CUDA, About, Sizes
from megatron_vlm.callbacks.run_log import read_rows

FAMILY = "gemma3"
STEPS = 30
STOPPED_AFTER = 10  # steps that are logged when SIGTERM is sent
ASKED_TO_END = 75  # exit code of a run that was saved before its end
# On CUDA some gradients are added in an order that differs between two runs, and from step to step more of it
# shows in the losses.
MOST_OF_FIRST, MOST_OF_ALL = (1e-3, 3e-2) if ON_CUDA else (0.0, 0.0)


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    """The losses of a run that was ended and resumed are those of one that was not."""
    processes = min(2, torch.cuda.device_count()) if ON_CUDA else 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        yield from compare_runs(folder, processes, about.folder)


def compare_runs(folder: Path, processes: int, logs: Path) -> Iterator[Row]:
    uninterrupted, stopped = folder / "uninterrupted", folder / "stopped"
    began = time.monotonic()
    code = train(uninterrupted, processes, logs / "run_uninterrupted.log")
    yield exit_row("a run without an interruption", code, 0, logs / "run_uninterrupted.log")
    took = time.monotonic() - began
    yield Row("run", f"{STEPS} steps on {processes} processes, with their start, seconds", took)
    code = train(stopped, processes, logs / "run_stopped.log", STOPPED_AFTER)
    yield exit_row("SIGTERM in the middle", code, ASKED_TO_END, logs / "run_stopped.log")
    step = max(losses(stopped, "loss"), default=0)
    yield Row("run", f"steps of {STEPS} before it ended", float(step), wrong=not 0 < step < STEPS)
    code = train(stopped, processes, logs / "run_resumed.log")
    yield exit_row("the same command again", code, 0, logs / "run_resumed.log")
    expected, resumed = losses(uninterrupted, "loss"), losses(stopped, "loss")
    both = expected.keys() & resumed.keys()
    yield Row("run", "steps without a loss", float(STEPS - len(both)), 0)
    if len(both) < STEPS or step == STEPS:
        return
    apart = {number: abs(resumed[number] - expected[number]) for number in both}
    yield Row("run", f"{NAME}, loss of the first step after it, apart by", apart[step + 1], MOST_OF_FIRST)
    yield Row("run", f"{NAME}, losses apart by at most", max(apart.values()), MOST_OF_ALL)
    for number, loss in losses(uninterrupted, "valid_loss").items():
        error = abs(losses(stopped, "valid_loss")[number] - loss)
        yield Row("run", f"{NAME}, validation after step {number}, apart by", error, MOST_OF_ALL)


def prepare(folder: Path) -> None:
    """Digits as JPEG files in an Energon dataset, and a checkpoint of random weights, as `make demo` has."""
    sys.path.append(str(ROOT / "examples/digits"))
    from make_checkpoint import make_checkpoint
    from make_digits import make_digits
    from megatron_vlm.data.prepare import prepare_energon_dataset

    make_digits(folder / "raw", variants=0, train_pairs=200, held_out_pairs=20)
    sources = {"train": folder / "raw/train.jsonl", "val": folder / "raw/held_out.jsonl"}
    prepare_energon_dataset(sources, folder / "dataset", workers=1, progress=False)
    make_checkpoint(FAMILY, str(folder / "start"))


def train(run_dir: Path, processes: int, log: Path, stopped_after: int | None = None) -> int:
    """The exit code of `megatron-vlm train`, which gets SIGTERM as soon as so many steps are logged."""
    folder = run_dir.parent
    words = [sys.executable, "-m", "megatron_vlm.cli", "train", "--recipe", f"{FAMILY}_tiny_digits"]
    words += ["--nproc", str(processes), "--run_dir", str(run_dir), "--hf_path", str(folder / "start")]
    words += ["--train_data_path", str(folder / "dataset"), f"tp={processes}", f"dtype={NAME}"]
    words += [f"steps={STEPS}", "num_workers=2", "micro_batch_size=1", "global_batch_size=4"]
    words += ["save_every=4", "eval_every=15", "train.eval_steps=2", "logging.tensorboard=false"]
    words += ["data.packing=stream", "data.packing_buffer_size=50"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    with open(log, "w") as file:
        run = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
        while stopped_after and run.poll() is None:
            if len(losses(run_dir, "loss")) >= stopped_after:
                run.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        return run.wait()


def losses(run_dir: Path, name: str) -> dict[int, float]:
    """Step -> this figure of metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    return {row["step"]: row[name] for row in read_rows(file) if name in row} if file.exists() else {}


def exit_row(what: str, code: int, expected: int, log: Path) -> Row:
    if code == expected:
        return Row("run", f"{what}, exit code", float(code))
    last = " ".join(log.read_text(errors="replace").split())[-400:]
    what = f"{what}, exit code in place of {expected}; {log.name}{LOG_TAIL}{last}"
    return Row("run", what, float(code), wrong=True)
