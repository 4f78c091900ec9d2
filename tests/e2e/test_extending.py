"""docs/extending.md: the examples of examples/extend in a run, and what is wrong with files like them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import COMMAND, run_program
from sources import write_sharegpt

from megatron_vlm.config import ConfigError
from megatron_vlm.imports import load_object
from megatron_vlm.recipes import compose, load_recipe
from tiny.checkpoints import build_tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples/extend"

OWN = """
from __future__ import annotations

from dataclasses import dataclass

import beside
from megatron_vlm.callbacks import Callback
from megatron_vlm.recipes import load_recipe


@dataclass
class Rate:  # dataclasses look for the module
    value: float


def own(steps: int = 7, rate: Rate | None = None, factor=2, **changes):
    config = load_recipe("gemma3_tiny_digits")(steps=steps * factor, **changes)
    config.name = beside.NAME
    return config


def takes_nothing():
    return load_recipe("gemma3_tiny_digits")()


def needs_data(root):
    return load_recipe("gemma3_tiny_digits")(train_data_path=root)


def fails(**changes):
    return changes["no such"]


def no_config(**changes):
    return {}


class Rows(Callback):
    def on_log(self, run, step, metrics):
        run.message(f"row {sorted(metrics)}")
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "beside.py").write_text('NAME = "mine"\n')
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "own.py")


def test_a_run_by_the_recipe_the_loss_and_the_callback_of_the_examples(tmp_path):
    checkpoint = build_tiny_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    data = write_sharegpt(tmp_path / "source", 12)
    (tmp_path / "own_rows.py").write_text(OWN.replace("import beside\n", ""))
    flags = [
        f"--recipe={EXAMPLES}/recipe.py:receipts",
        f"--hf_path={checkpoint}",
        f"--train_data_path={data}",
    ]
    settings = ["resolution=low", "tp=1", "steps=4", "train.global_batch_size=2", "data.num_workers=0"]
    settings += ["dtype=fp32", f"logging.trackers=[{tmp_path}/own_rows.py:Rows]", f"run_dir={tmp_path}/run"]
    ended = run_program(COMMAND, "train", *flags, *settings)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "lr" in row]
    assert len(steps) == 4 and all(0 < row["loss"] < row["cross_entropy"] for row in steps)
    assert any("mine/steps_below" in row for row in rows)
    assert "saved in " in ended.stdout and "row ['cross_entropy'" in ended.stdout
    config = (tmp_path / "run/config.yaml").read_text()
    assert f"max_pixels: {640 * 28**2}" in config and "r: 16" in config


def test_a_recipe_decides_about_its_parameters_and_gets_the_rest_as_settings(own):
    config = compose(f"{own}:own", settings=["train.steps=5", "factor=3", "tp=2", "optimizer.eps=1e-6"])
    assert (config.name, config.train.steps, config.parallel.tp) == ("mine", 15, 2)
    assert config.optimizer.eps == 1e-6
    assert load_recipe("own:own")(steps="4").train.steps == 8  # a module in the folder of the command
    assert compose("own:takes_nothing", settings=["tp=2"]).parallel.tp == 2
    assert compose("own:needs_data", settings=["root=a.jsonl"]).data.train_data_path == "a.jsonl"


def test_a_file_for_config_names_a_users_recipe(own, tmp_path):
    (tmp_path / "run.yaml").write_text("recipe: own.py:own\nargs: {factor: 3, tp: 2}\n")
    config = compose(file=tmp_path / "run.yaml")
    assert (config.train.steps, config.parallel.tp) == (21, 2)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("own.py:fails", [], r"recipe own.py:fails: KeyError: 'no such' in line 31; correct the file"),
        ("own.py:no_config", [], "returned dict; return a RunConfig"),
        ("own.py:needs_data", [], "it needs a value for root; give root=…"),
        ("own.py:own", ["factr=2"], "factr: not an argument of a recipe; did you mean factor"),
        ("own.py:own", ["factor=many"], "own.py:own: factor: 'many'"),
        ("own.py:own", ["tp=two"], "parallel.tp: 'two'"),
        ("own.py:owns", [], "own.py has no owns; did you mean own"),
        ("owm.py:own", [], "owm.py does not exist"),
        ("owm:own", [], "ModuleNotFoundError: No module named 'owm'; give a module that Python can import"),
        ("own.py:", [], "names no object; give FILE.py:NAME"),
    ],
)
def test_a_wrong_recipe_is_named(own, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        compose(name, settings=settings)


def test_a_file_runs_once_in_a_process_and_files_of_one_name_are_two(own, tmp_path):
    assert load_object("x", f"{own}:own") is load_object("x", "own.py:own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/own.py").write_text("own = 3\n")
    assert load_object("x", "other/own.py:own") == 3
    assert load_object("x", "own.py:own") is load_object("x", f"{own}:own")


def test_a_file_that_fails_is_told_with_its_line_and_read_again(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigError, match=r"x: JSONDecodeError: .* in line 3; correct the file"):
        load_object("x", f"{file}:own")
    file.write_text("own = 3\n")
    assert load_object("x", f"{file}:own") == 3
