import json

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contact_sheet import contact_sheet
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.files import read_rows
from megatron_vlm.overrides import apply_overrides, from_yaml
from megatron_vlm.run_folder.run_log import RunLogger, draw_losses


def config(*overrides: str) -> RunConfig:
    return apply_overrides(RunConfig(), ["run_dir=x", "logging.tensorboard=false", *overrides])


def log_steps(logger: RunLogger, first: int, last: int, loss: float = 1.0) -> None:
    for step in range(first, last + 1):
        numbers = {"loss": loss / step, "lr": 0.1, "grad_norm": 2.0, "trained_tokens": 10, "seconds": 0.5}
        of_source = {"trained_tokens/a": 4, "loss/a": 2.0}
        logger.log_step(step, **numbers, dropped=step, figures=of_source)


def test_a_step_is_a_row_with_its_numbers(tmp_path):
    logger = RunLogger(tmp_path, config(), total_steps=2)
    logger.log_step(1, 3.0, 0.1, 2.0, 10, 0.5, dropped=3)
    logger.log_step(2, float("nan"), 0.2, 2.0, 30, 0.5)
    logger.close()
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
    logger = RunLogger(tmp_path, config("logging.tensorboard=true"), total_steps=1)
    logger.log_step(1, 3.0, 0.1, 2.0, 10, 0.5, figures=figures)
    logger.close()
    assert figures.items() <= list(read_rows(tmp_path / "metrics.jsonl"))[0].items()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("mfu")[0].value == pytest.approx(0.4127)
    shown = "MFU 41.3% · 9,876 tokens/s/device · 12.0 images/s/device · padding 26% · data 0.25 s · 61.2 GB"
    shown = f"lr_tower 2.00e-06 · epoch 1.50 · {shown}"
    assert f" · 20 trained tokens/s · {shown} · experts 1.50 · " in capsys.readouterr().out


def test_resume_keeps_each_step_once_and_goes_on_counting(tmp_path):
    first = RunLogger(tmp_path, config(), total_steps=6)
    log_steps(first, 1, 4)
    first.log_eval(2, 0.7)
    first.log_eval(4, 0.6)
    first.close()
    resumed = RunLogger(tmp_path, config(), total_steps=6, start_step=3, totals={"trained_tokens": 20})
    log_steps(resumed, 3, 6, loss=2.0)
    resumed.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["valid_loss"] for row in rows if "valid_loss" in row] == [0.7]
    assert [row["trained_tokens"] for row in rows if "loss" in row] == [10, 20, 30, 40, 50, 60]
    assert [row["dropped_samples"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_totals_of_steps_without_a_row_are_known_after_a_resume(tmp_path):
    first = RunLogger(tmp_path, config("logging.log_every=3"), total_steps=9)
    log_steps(first, 1, 5)
    first.close()
    assert first.totals["trained_tokens/a"] == 20
    totals = dict(first.totals) | {"rows": 7}  # as a checkpoint of step 5 holds them
    resumed = RunLogger(tmp_path, config("logging.log_every=3"), 9, start_step=6, totals=totals)
    log_steps(resumed, 6, 9)
    resumed.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["trained_tokens"]) for row in rows] == [(1, 10), (3, 30), (6, 60), (9, 90)]
    assert [row["dropped_samples"] for row in rows] == [1, 3, 6, 9]
    assert [row["trained_tokens/a"] for row in rows] == [4, 12, 24, 36] and "rows" not in rows[-1]


@pytest.mark.parametrize(
    "line", [b"garbage\n", b"[1]\n", b"\xff\n", b'{"loss": 1}\n', b"\0\n", b'{"step": true}\n']
)
def test_a_line_that_no_run_wrote_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'{"step": 2}\n')
    with pytest.raises(ConfigError, match="metrics.jsonl: line 2 is not what a run wrote; take the line out"):
        RunLogger(tmp_path, config(), total_steps=3, start_step=3)


def test_a_row_cut_short_by_a_kill_does_not_stop_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "trained_tokens": 5}\n{"step": 2, "lo')
    logger = RunLogger(tmp_path, config(), total_steps=2, start_step=2)
    log_steps(logger, 2, 2)
    logger.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    logger = RunLogger(tmp_path, config(), total_steps=9)
    log_steps(logger, 1, 1)
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 1
    logger.close()


def test_log_every_leaves_steps_out_but_not_their_tokens(tmp_path):
    logger = RunLogger(tmp_path, config("logging.log_every=3"), total_steps=7)
    log_steps(logger, 1, 7)
    logger.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["trained_tokens"]) for row in rows] == [(1, 10), (3, 30), (6, 60), (7, 70)]


def test_the_run_folder_holds_config_events_and_picture(tmp_path):
    run_config = config("logging.tensorboard=true", "train.steps=3")
    logger = RunLogger(tmp_path, run_config, total_steps=3)
    log_steps(logger, 1, 3)
    logger.log_eval(3, 0.5)
    logger.close()
    logger.close()  # a second time does no harm
    assert from_yaml((tmp_path / "config.yaml").read_text()) == run_config
    assert Image.open(tmp_path / "loss.png").format == "PNG"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert events.Scalars("valid_loss")[0].value == 0.5


def test_ranks_that_do_not_write_leave_nothing(tmp_path):
    logger = RunLogger(tmp_path / "run", config(), total_steps=3, is_writer=False)
    log_steps(logger, 1, 3)
    logger.log_eval(3, 0.5)
    logger.message("hello")
    logger.save()
    logger.close()
    assert not (tmp_path / "run").exists()


def test_without_a_terminal_a_long_run_prints_a_line_now_and_then(tmp_path, capsys):
    logger = RunLogger(tmp_path, config(), total_steps=200)
    log_steps(logger, 1, 200)
    logger.close()
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert 20 <= len(lines) <= 22 and printed.err == ""
    assert lines[0].startswith("step 1/200 · loss 1.0000 · lr 1.00e-01 · grad 2.00 · 20 trained tokens/s · ")
    assert lines[-1].startswith("step 200/200 · loss 0.0050 ") and lines[-1].endswith(" 00:00 left")


def test_validation_alone_draws_a_picture_and_nothing_draws_none(tmp_path):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("")
    draw_losses(metrics, picture)
    assert not picture.exists()
    metrics.write_text(json.dumps({"step": 1, "valid_loss": 1.0}) + "\n")
    draw_losses(metrics, picture)
    assert picture.exists()


def test_contact_sheet_writes_right_in_green_and_wrong_in_red(tmp_path):
    tile = Image.new("L", (20, 30), 128)
    path = tmp_path / "sheet.png"

    def has_green_and_red(correct: list[bool]) -> tuple[bool, bool]:
        contact_sheet([[tile], [tile, tile]], ["Which digit?\n3", "What is the sum?\n12"], correct, path)
        colors = {color for _, color in Image.open(path).convert("RGB").getcolors(1 << 20)}
        return (0, 128, 0) in colors, (255, 0, 0) in colors

    assert has_green_and_red([True, True]) == (True, False)
    assert has_green_and_red([True, False]) == (True, True)
    assert has_green_and_red([False, False]) == (False, True)


def test_contact_sheet_shows_an_answer_that_looks_like_a_formula(tmp_path):
    contact_sheet([[Image.new("L", (8, 8))]], [r"What?\n$\nonsense{$"], [True], tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").exists()
