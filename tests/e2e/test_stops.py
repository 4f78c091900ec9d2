"""A run that is asked to end early saves, ends with exit code 75, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import COMMAND, start_ranks
from run_results import figures, saved_tensors
from sources import write_hf_folder, write_sharegpt

from megatron_vlm.config import TrainConfig, seconds_in
from megatron_vlm.job import stops
from megatron_vlm.job.step_schedule import StepSchedule

STEPS = 14
SAID = "with a checkpoint; start the same command again to go on."


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stops")
    return write_hf_folder(folder / "rows", write_sharegpt(folder / "source", 60))


def words(run_dir: Path, checkpoint: Path, dataset: Path, *settings: str) -> list[str]:
    return [
        *("train", "--recipe", "gemma3_tiny_digits", "tp=1", "--run_dir", str(run_dir)),
        *("--hf_path", str(checkpoint), "--dataset_type", "hf", "--train_data_path", str(dataset)),
        *("eval_every=0", f"steps={STEPS}", "num_workers=1", "micro_batch_size=1", "global_batch_size=2"),
        *("save_every=0", "warmup_steps=1", "logging.tensorboard=false", *settings),
    ]


def logged(run_dir: Path) -> int:
    """The steps that were logged."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def wait_for_steps(run_dir: Path, steps: int, runs: Callable[[], bool]) -> None:
    while logged(run_dir) < steps:
        assert runs(), f"{run_dir} ended before step {steps}"
        time.sleep(0.005)


def train(run_dir: Path, ranks: int, given: list[str], sent: dict[int, int] | None = None) -> list[int]:
    """The exit codes of the ranks; each of `sent` gets its signal when two steps more are logged."""
    run_dir.mkdir(exist_ok=True)
    before = logged(run_dir)
    job = start_ranks(ranks, COMMAND, *given, log=run_dir / "log")
    if sent:
        wait_for_steps(run_dir, before + 2, lambda: all(rank.is_alive() for rank in job.ranks))
        for rank, number in sent.items():
            os.kill(job.ranks[rank].pid, number)
    for rank in job.ranks:
        rank.join(200)
    return [rank.exitcode for rank in job.ranks]


def saved_step(run_dir: Path) -> int:
    return int((run_dir / "checkpoints/latest").read_text().strip().removeprefix("step_"))


def stopped_and_whole(
    ranks: int, sent: dict | None, settings: list[str], by: str, dataset: Path, checkpoint: Path, root: Path
) -> tuple[Path, Path]:
    """The folders of a run that was asked to stop and went on, and of one that was not: they are the same
    bit for bit. Whichever of its ranks is asked, all end with the same checkpoint."""
    whole, stopped = root / "whole", root / "stopped"
    given = words(stopped, checkpoint, dataset, *settings)
    assert train(stopped, ranks, given, sent) == [75] * ranks, (stopped / "log").read_text()
    step = saved_step(stopped)
    assert step == logged(stopped) and 2 <= step < STEPS
    last = (stopped / "log").read_text().splitlines()[-1]
    assert last == f"megatron-vlm: stopped after step {step} of {STEPS} by {by}, {SAID}"
    rest = [setting for setting in settings if "stop_after" not in setting]
    assert train(stopped, ranks, words(stopped, checkpoint, dataset, *rest)) == [0] * ranks
    assert f"resumed after step {step} " in (stopped / "log").read_text()
    assert train(whole, ranks, words(whole, checkpoint, dataset, *rest)) == [0] * ranks
    assert figures(stopped) == figures(whole) and logged(whole) == STEPS
    expected = saved_tensors(whole, STEPS)
    assert len(expected) > 20
    for name, tensor in saved_tensors(stopped, STEPS).items():
        assert torch.equal(tensor, expected[name]), name
    return stopped, whole


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "sent", "settings", "by"),
    [
        (1, {0: signal.SIGTERM}, ["num_workers=0"], "SIGTERM"),
        (2, {0: signal.SIGTERM, 1: signal.SIGTERM}, ["tp=2"], "SIGTERM"),
        (1, None, ["train.stop_after=1s"], "train.stop_after"),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_equal(
    ranks, sent, settings, by, dataset, tiny_gemma3, tmp_path
):
    stopped_and_whole(ranks, sent, settings, by, dataset, tiny_gemma3, tmp_path)


def test_time_counts_from_the_command_that_started_the_ranks(monkeypatch):
    """A rank that `--restarts` started has no more time than the first."""
    for started, is_over in ((time.time() - 50, False), (time.time() - 70, True)):
        monkeypatch.setenv(stops.STARTED, str(started))
        with stops.note_sigterm("60s"):
            assert stops.stop_flags()[-1] == is_over


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGUSR1, 75, f" by SIGUSR1, {SAID}", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 75, f" by SIGTERM, {SAID}", marks=pytest.mark.soak),
        pytest.param(
            signal.SIGINT,
            130,
            "start the same command again: it goes on from what is saved.",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_launcher_passes_warnings_on_to_its_ranks(number, code, said, dataset, tiny_gemma3, tmp_path):
    command = [sys.executable, "-m", "megatron_vlm.cli", *words(tmp_path, tiny_gemma3, dataset, "steps=5000")]
    with tmp_path.with_suffix(".log").open("w") as screen:
        run = subprocess.Popen([*command, "--nproc", "2"], stdout=screen, stderr=subprocess.STDOUT)
    try:
        wait_for_steps(tmp_path, 2, lambda: run.poll() is None)
        run.send_signal(number)
        assert run.wait(60) == code
    finally:
        run.kill()
    output = tmp_path.with_suffix(".log").read_text().splitlines()
    assert output[-1].startswith("megatron-vlm: stopped ") and output[-1].endswith(said), output
    assert (code == 75) == (tmp_path / "checkpoints/latest").exists()


ALONE = """
import os, signal, sys, time
from megatron_vlm.job import errors, stops, watchdog
with errors.exit_with_reason("megatron-vlm"):
    stops.expect_warnings()
    with watchdog.watching(sys.argv[1], 60):
        {before}
        with stops.note_sigterm(sys.argv[2] if sys.argv[2:] else None):
            {within}
            print([way for way, is_asked in zip(stops.WAYS, stops.stop_flags()) if is_asked])
"""


@pytest.mark.parametrize(
    ("before", "within", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGUSR1)", "", 0, "['SIGUSR1']"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "", 143, ""),
        # `timeout` sends it to a process and to its group: the same wish
        ("", "[os.kill(os.getpid(), signal.SIGTERM) for _ in 'ab']", 0, "['SIGTERM']"),
        (
            "stops.AGAIN_AFTER = 0.1",
            "[(os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.2)) for _ in 'ab']",
            -signal.SIGTERM,
            "",
        ),
        # a data worker ends of it, and its rank goes on
        ("", "os.fork() or os.kill(os.getpid(), signal.SIGTERM); os.wait()", 0, "[]"),
    ],
)
def test_what_signals_do_before_and_within_steps(before, within, code, said, tmp_path):
    program = ALONE.format(before=before or "pass", within=within or "pass")
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr


@pytest.mark.parametrize(
    ("asked_in", "stops_after", "saves"),
    [
        (3, 4, [4, 8, 10]),
        (4, 4, [4, 8, 10]),
        (6, 6, [4, 6, 8, 10]),
        (8, 8, [4, 8, 10]),
        (9, None, [4, 8, 10]),
    ],
)
def test_a_run_stops_after_the_step_that_has_begun(asked_in, stops_after, saves):
    """What the next step needs is on its way when a step ends, unless that saves or validates."""
    train = TrainConfig(steps=10, save_every=4, eval_every=6, keep_best=True)
    stopping = StepSchedule(train, 10).stopping_soon(asked_in)
    assert stopping.stop == stops_after and stopping.stopping_soon(asked_in + 1).stop == stops_after
    assert [step for step in range(1, 11) if stopping.saves_after(step)] == saves
    assert [step for step in range(1, 11) if stopping.evaluates_after(step)] == [4, 6, 8, 10]
    assert stops_after is None or not stopping.has_step_after(stops_after)


@pytest.mark.parametrize("text", ["", "soon", "3h 50m", "-5", "50m3h", "1.2.3", "h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match=r"is no time; write it as 3h50m, 90s or a number of seconds\."):
        seconds_in(text)
