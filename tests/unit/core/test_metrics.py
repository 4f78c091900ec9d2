import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios

import numpy as np
import pytest
import torch
from logged_runs import begun_run, log_step, validate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_vlm.callbacks import Run
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.overrides import apply_overrides, from_yaml


def config(folder, *overrides: str) -> RunConfig:
    return apply_overrides(RunConfig(), [f"run_dir={folder}", "logging.tensorboard=false", *overrides])


def log_steps(run: Run, first: int, last: int, loss: float = 1.0) -> None:
    for step in range(first, last + 1):
        log_step(run, loss / step, dropped=step, **{"trained_tokens/a": 4, "loss/a": 2.0})


def test_a_step_is_a_row_with_its_numbers(tmp_path):
    run = begun_run(config(tmp_path), 2)
    log_step(run, 3.0, dropped=3)
    log_step(run, float("nan"), trained_tokens=30)
    run.callbacks.close()
    first, second = list(read_rows(tmp_path / "metrics.jsonl"))
    assert first == {
        "step": 1,
        "loss": 3.0,
        "lr": 0.1,
        "grad_norm": 2.0,
        "seconds": 0.5,
        "trained_tokens": 10,
        "dropped_samples": 3,
    }
    assert (second["loss"], second["trained_tokens"]) == (None, 40)


def test_figures_are_in_the_row_the_events_and_few_in_the_line(tmp_path, capsys):
    figures = {"mfu": 0.4127, "tflops_per_device": 408.0, "tokens_per_second": 9876.5}
    figures |= {"images_per_second_per_device": 12.0, "padding": 0.257, "data_seconds": 0.25}
    figures |= {"peak_memory_gb": 61.24, "expert_balance": 1.5, "expert_balance_worst": 2.5}
    figures |= {"epoch": 1.5, "lr_tower": 2e-6}
    run = begun_run(config(tmp_path, "logging.tensorboard=true"), 1)
    log_step(run, 3.0, **figures)
    run.callbacks.close()
    assert figures.items() <= list(read_rows(tmp_path / "metrics.jsonl"))[0].items()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("mfu")[0].value == pytest.approx(0.4127)
    shown = "step 1/1 · loss 3.0000 · lr 1.00e-01 · grad 2.00 · 9,876 tok/s · 00:00 left\n"
    assert re.fullmatch(r"\d\d:\d\d:\d\d " + shown, capsys.readouterr().out)


def test_without_a_terminal_a_line_is_printed_for_each_logged_step(tmp_path, capsys):
    run = begun_run(config(tmp_path, "logging.log_every=20", "train.objective=dpo"), 100, done=9)
    for step in range(10, 101):
        log_step(run, margin=0.1, accuracy=0.75)
        if step == 40:
            validate(run, 0.5)
    run.callbacks.on_train_end(run)
    run.callbacks.close()
    lines = capsys.readouterr().out.splitlines()
    steps = [
        re.search(r"step (\d+)/100 · loss 1.0000 · lr 1.00e-01 · margin 0.10 · ", line) for line in lines
    ]
    assert [match and int(match[1]) for match in steps] == [10, 20, 40, None, 60, 80, 100, *[None] * 4]
    assert lines[3].endswith(" step 40 · validation loss 0.5000")
    assert lines[-4:] == [
        f"saved in {tmp_path}/checkpoints/step_00000100",
        f"report: {tmp_path}/report.html",
        f"export it: megatron-vlm export {tmp_path} {tmp_path}-hf",
        f'ask it: megatron-vlm generate {tmp_path} "<image>What is this?" --image FILE',
    ]


def test_the_bar_and_its_figures_fit_into_100_columns(tmp_path):
    """In a terminal of that width; the bar has at least ten columns, also of a step that takes long."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with os.fdopen(end, "w") as stderr, contextlib.redirect_stderr(stderr):
        run = begun_run(config(tmp_path), 100_000, done=50_000)
        log_step(run, 12.5, lr=1e-5, grad_norm=12.5, tokens_per_second=234_567.0)
        run.callbacks.close()
    text = b""
    with contextlib.suppress(OSError):  # all is read, and the other end is closed
        while some := os.read(terminal, 1 << 16):
            text += some
    os.close(terminal)
    shown = re.split(r"[\r\n]+", text.decode().strip())[-1]
    assert len(shown) <= 100 and shown.endswith("loss 12.5000 · lr 1.00e-05 · grad 12.50 · 234,567 tok/s")
    assert len(re.search(r"\|(.*)\|", shown)[1]) >= 10


def test_a_callback_may_not_log_a_figure_of_the_run(tmp_path):
    run = begun_run(config(tmp_path), 2)
    run.step = 1
    run.log({"own": 1.0})
    here = rf"{__file__}:{sys._getframe().f_lineno - 1}"
    again = rf"run.log in {__file__}:\d+: own of step 1 is logged in {here}; give another name\."
    with pytest.raises(ConfigError, match=again):
        run.log({"own": 2.0})
    run.log({"lr": 1.0}, step=2)
    with pytest.raises(ConfigError, match=rf"lr of step 2 is logged in {__file__}:\d+; give another"):
        log_step(run)
    run.callbacks.close()


@pytest.mark.parametrize("is_first_rank", [True, False])
@pytest.mark.parametrize(
    "value", ["high", None, torch.tensor(1.0), np.float32(1), [1.0]], ids=lambda v: type(v).__name__
)
def test_what_is_no_number_is_refused_with_the_line_that_logs_it(tmp_path, value, is_first_rank):
    run = begun_run(config(tmp_path), 2, is_first_rank=is_first_rank)
    line = sys._getframe().f_lineno + 3
    said = rf"run.log in {__file__}:{line}: own of step 0 is a {type(value).__name__}; give a Python "
    with pytest.raises(ConfigError, match=said):
        run.log({"own": value})
    run.callbacks.close()


def test_a_validation_by_rewards_shows_the_reward(tmp_path, capsys):
    run = begun_run(config(tmp_path), 2)
    validate(run, -0.25, valid_reward=0.25)
    run.callbacks.close()
    assert capsys.readouterr().out.endswith(" step 0 · valid_reward 0.2500\n")


def test_resume_keeps_each_step_once_and_goes_on_counting(tmp_path):
    first = begun_run(config(tmp_path), 6)
    log_steps(first, 1, 2)
    validate(first, 0.7)
    log_steps(first, 3, 4)
    validate(first, 0.6)
    first.callbacks.close()
    resumed = begun_run(config(tmp_path), 6, done=2, state={"trained_tokens": 20})
    log_steps(resumed, 3, 6, loss=2.0)
    resumed.callbacks.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["valid_loss"] for row in rows if "valid_loss" in row] == [0.7]
    assert [row["trained_tokens"] for row in rows if "loss" in row] == [10, 20, 30, 40, 50, 60]
    assert [row["dropped_samples"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_row_cut_short_by_a_kill_does_not_stop_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "trained_tokens": 5}\n{"step": 2, "lo')
    run = begun_run(config(tmp_path), 2, done=1)
    log_steps(run, 2, 2)
    run.callbacks.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_log_every_leaves_steps_out_but_not_their_tokens(tmp_path):
    run = begun_run(config(tmp_path, "logging.log_every=3"), 7)
    log_steps(run, 1, 7)
    run.callbacks.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["trained_tokens"]) for row in rows] == [(1, 10), (3, 30), (6, 60), (7, 70)]


def test_the_run_folder_holds_config_and_events(tmp_path):
    run_config = config(tmp_path, "logging.tensorboard=true", "train.steps=3")
    run = begun_run(run_config, 3)
    log_steps(run, 1, 3)
    validate(run, 0.5)
    run.callbacks.close()
    assert from_yaml((tmp_path / "config.yaml").read_text()) == run_config
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert events.Scalars("valid_loss")[0].value == 0.5
