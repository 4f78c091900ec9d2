"""Commands for exported folders: their scores are logged, and what goes wrong with them is told."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from logged_runs import begun_run
from torch import distributed as dist

from megatron_vlm.callbacks import Run
from megatron_vlm.callbacks.exports import Exports, running, scores_in
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import LoggingConfig, RunConfig, TrainConfig
from megatron_vlm.job import stops, watchdog


@pytest.fixture(autouse=True)
def ranks_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def commands_of(folder: Path, text: str, done: int = 8) -> tuple[Run, Exports]:
    """Of a run in `folder` that has trained `done` steps; `text` is what its command does with $1."""
    (folder / "command.sh").write_text(text)
    train = TrainConfig(on_export=f"sh {folder}/command.sh")
    config = RunConfig(run_dir=str(folder), train=train, logging=LoggingConfig(tensorboard=False))
    commands = Exports()
    return begun_run(config, 10, commands, done=done), commands


def export(run: Run, step: int) -> None:
    """As if its folder was written: only what is done then counts here."""
    running(run.config.run_dir, step).parent.mkdir(exist_ok=True)
    running(run.config.run_dir, step).touch()
    after(run, step)


def after(run: Run, step: int) -> None:
    """What the commands' callback does when a step ends."""
    run.step = step
    run.callbacks._callbacks[-1].on_step_end(run, {})


def logged(folder: Path) -> list[dict]:
    return list(read_rows(folder / "metrics.jsonl"))


def test_scores_are_logged_at_the_step_of_their_export(tmp_path, capsys):
    run, commands = commands_of(
        tmp_path, 'echo hello; case $1 in *4) echo "{\\"a/b\\": 0.5, \\"c\\": 7}"; esac'
    )
    for step in (4, 8):
        export(run, step)
    run.callbacks.on_train_end(run)
    assert logged(tmp_path) == [{"step": 4, "on_export/a/b": 0.5, "on_export/c": 7.0}]
    assert (tmp_path / "on_export/step_00000008.txt").read_text() == "hello\n"
    assert capsys.readouterr().out == "step 4: on_export/a/b 0.5000 · on_export/c 7.0000\n"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo \"{'a': 1}\"", "its last line is no JSON object of numbers: Expecting property name"),
        (
            """echo '{"a": {"b": 1}}'""",
            "its last line is no JSON object of numbers: a is ",
        ),
        ("""echo '{"a": 1}'; exit 3""", "exit code 3; its output is in "),
    ],
)
def test_what_goes_wrong_is_told_once_and_logs_nothing(tmp_path, capsys, does, said):
    run, commands = commands_of(tmp_path, does)
    export(run, 4)
    run.callbacks.on_train_end(run)
    after(run, 5)
    printed = capsys.readouterr().out
    assert printed.count("train.on_export: sh ") == 1 and said in printed
    assert logged(tmp_path) == [] and len(list((tmp_path / "on_export").iterdir())) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"a": true}',
        '{"a": "1.5"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a\\nb": 1}',
        '{"a": null}',
        '{"a": "b"}',
        '{"a": 1',
        '{"a": 1} b',
        '{"a": 1e',
        "{" * 99_999,
    ],
)
def test_lines_that_are_no_objects_of_numbers(line):
    with pytest.raises(ValueError, match="no JSON object of numbers: "):
        scores_in(line)
    assert scores_in("[1]") == scores_in("done {}") == scores_in("") == scores_in("{}") == {}


def test_a_command_that_did_not_end_is_started_again_and_no_other(tmp_path):
    slow = f'echo "$1" >> {tmp_path}/begun; [ -e {tmp_path}/quick ] || sleep 60; echo "{{\\"a\\": 1}}"'
    run, commands = commands_of(tmp_path, slow)
    for step in (4, 8):
        export(run, step)
    while not (begun := tmp_path / "begun").exists() or len(begun.read_text().splitlines()) < 2:
        time.sleep(0.02)
    commands.close()
    assert [process.poll() is not None for process in commands.commands.values()] == [True, True]
    (tmp_path / "quick").touch()
    again, _ = commands_of(tmp_path, slow, done=4)  # the checkpoint is of step 4, and 8 is exported again
    again.callbacks.on_train_end(again)
    assert logged(tmp_path) == [{"step": 4, "on_export/a": 1.0}]
    once_more, _ = commands_of(tmp_path, slow, done=4)
    after(once_more, 7)
    export(once_more, 8)
    once_more.callbacks.on_train_end(once_more)
    assert [row["step"] for row in logged(tmp_path)] == [4, 8]
    assert sorted(line[-1] for line in begun.read_text().splitlines()) == ["4", "4", "8", "8"]


def test_a_kill_before_the_row_is_written_loses_no_figures(tmp_path, monkeypatch):
    run, commands = commands_of(tmp_path, """echo '{"a": 1}'""", done=4)
    export(run, 4)
    with monkeypatch.context() as patch:
        patch.setattr(run, "log", lambda *arguments: sys.exit("killed"))
        with pytest.raises(SystemExit):
            run.callbacks.on_train_end(run)
    again, _ = commands_of(tmp_path, """echo '{"a": 1}'""", done=4)
    again.callbacks.on_train_end(again)
    assert logged(tmp_path) == [{"step": 4, "on_export/a": 1.0}]


def test_a_command_is_no_rank_and_speaks_for_itself(tmp_path, monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", watchdog.LAUNCHER):
        monkeypatch.setenv(name, "1")
    run, commands = commands_of(tmp_path, "env")
    export(run, 4)
    run.callbacks.on_train_end(run)
    names = [line.partition("=")[0] for line in (tmp_path / "on_export/step_00000004.txt").open()]
    assert "PATH" in names and not {"RANK", "TORCHELASTIC_RUN_ID", watchdog.LAUNCHER}.intersection(names)


def run_that_is_killed(folder: Path) -> None:
    run, commands = commands_of(folder, f"sleep 60 & echo $$ > {folder}/begun; wait")
    with watchdog.watching(folder, 60):
        export(run, 4)
        os.kill(os.getpid(), signal.SIGSTOP)  # until it is killed


def test_commands_end_with_a_run_that_is_killed(tmp_path):
    """Or the next run would start each beside itself."""
    run = multiprocessing.get_context("fork").Process(target=run_that_is_killed, args=(tmp_path,))
    run.start()
    while not (begun := tmp_path / "begun").exists() or not begun.read_text():
        time.sleep(0.02)
    command = psutil.Process(int(begun.read_text()))
    both = [command, *command.children()]
    assert len(both) == 2
    run.kill()
    assert not psutil.wait_procs(both, timeout=5)[1]


def test_the_watchdog_hears_of_the_wait_which_a_warning_ends(tmp_path, monkeypatch):
    run, commands = commands_of(tmp_path, "sleep 60")
    with watchdog.watching(tmp_path, 60):
        export(run, 4)
        content = watchdog.watch().content
        beats = content["beats"]
        left = iter([False, False, True])
        monkeypatch.setattr(stops, "stop_flags", lambda: [next(left), False, False])
        run.callbacks.on_train_end(run)
        assert run.stopped_by == ["SIGTERM"]
        assert content["beats"] == beats + 2 and "on_export of step 4" in content["doing"]
    commands.close()
    assert (tmp_path / "on_export/step_00000004.running").exists()
