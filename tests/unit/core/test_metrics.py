import pytest
from logged_runs import begun_run, log_step, validate
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_vlm.callbacks import Run
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import RunConfig
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
        "tokens_per_second": 20.0,
        "seconds": 0.5,
        "trained_tokens": 10,
        "dropped_samples": 3,
    }
    assert (second["loss"], second["trained_tokens"]) == (None, 40)


def test_figures_are_in_the_row_the_events_and_the_bar(tmp_path, capsys):
    figures = {"mfu": 0.4127, "tflops_per_device": 408.0, "tokens_per_second_per_device": 9876.5}
    figures |= {"images_per_second_per_device": 12.0, "padding": 0.257, "data_seconds": 0.25}
    figures |= {"peak_memory_gb": 61.24, "expert_balance": 1.5, "expert_balance_worst": 2.5}
    figures |= {"epoch": 1.5, "lr_tower": 2e-6}
    run = begun_run(config(tmp_path, "logging.tensorboard=true"), 1)
    log_step(run, 3.0, **figures)
    run.callbacks.close()
    assert figures.items() <= list(read_rows(tmp_path / "metrics.jsonl"))[0].items()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("mfu")[0].value == pytest.approx(0.4127)
    shown = "MFU 41.3% · 9,876 tokens/s/device · 12.0 images/s/device · padding 26% · data 0.25 s · 61.2 GB"
    shown = f"lr_tower 2.00e-06 · epoch 1.50 · {shown}"
    assert f" · 20 trained tokens/s · {shown} · experts 1.50 · " in capsys.readouterr().out


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


def test_the_run_folder_holds_config_events_and_picture(tmp_path):
    run_config = config(tmp_path, "logging.tensorboard=true", "train.steps=3")
    run = begun_run(run_config, 3)
    log_steps(run, 1, 3)
    validate(run, 0.5)
    run.callbacks.close()
    assert from_yaml((tmp_path / "config.yaml").read_text()) == run_config
    assert Image.open(tmp_path / "loss.png").format == "PNG"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert events.Scalars("valid_loss")[0].value == 0.5
