"""Commands for exported folders: their scores are logged, and what goes wrong with them is told."""

from pathlib import Path

import pytest
from logged_runs import begun_run
from torch import distributed as dist

from megatron_vlm.callbacks import Run
from megatron_vlm.callbacks.exports import Exports, running
from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.config import LoggingConfig, RunConfig, TrainConfig


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
    lines = capsys.readouterr().out.splitlines()  # the first command may end before or after the run
    assert lines.count("step 4: on_export/a/b 0.5000 · on_export/c 7.0000") == 1


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
