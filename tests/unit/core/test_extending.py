"""Files of users (docs/how-to/extend.md): recipes, what fails in them, and losses that are none."""

from __future__ import annotations

import pytest

from megatron_vlm.callbacks.base import callback_class
from megatron_vlm.callbacks.built_in import callbacks_of
from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.imports import load_object
from megatron_vlm.recipes import compose, load_recipe

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


def misspells(**changes):
    config = load_recipe("gemma3_tiny_digits")(**changes)
    config.train.stepss = 3
    return config


class TakesTooLittle(Callback):
    def on_step_begin(self, run, *more):
        pass

    def on_step_end(self, run):
        pass


class NeverCalled(Callback):
    def on_step_ended(self, run, metrics):
        pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "beside.py").write_text('NAME = "mine"\n')
    for name in ("own.py", "recipes_of_a_module.py"):
        (tmp_path / name).write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "own.py")


def test_a_recipe_decides_about_its_parameters_and_gets_the_rest_as_settings(own):
    config = compose(f"{own}:own", settings=["train.steps=5", "factor=3", "tp=2", "optimizer.eps=1e-6"])
    assert (config.name, config.train.steps, config.parallel.tp) == ("mine", 15, 2)
    assert config.optimizer.eps == 1e-6
    assert (
        load_recipe("recipes_of_a_module:own")(steps="4").train.steps == 8
    )  # a module in the folder of the command
    assert compose("recipes_of_a_module:takes_nothing", settings=["tp=2"]).parallel.tp == 2
    assert (
        compose("recipes_of_a_module:needs_data", settings=["root=a.jsonl"]).data.train_data_path == "a.jsonl"
    )


def test_a_file_for_config_names_a_users_recipe(own, tmp_path):
    (tmp_path / "run.yaml").write_text("recipe: own.py:own\nargs: {factor: 3, tp: 2}\n")
    config = compose(file=tmp_path / "run.yaml")
    assert (config.train.steps, config.parallel.tp) == (21, 2)


def test_a_misspelled_method_of_a_callback_is_named(own):
    with pytest.raises(ConfigError, match="on_step_ended is never called; did you mean on_step_end"):
        callback_class(f"{own}:NeverCalled")


def test_a_method_of_a_callback_with_other_parameters_is_named_with_its_line(own):
    line = OWN.splitlines().index("    def on_step_end(self, run):") + 1
    said = rf"TakesTooLittle: on_step_end \(.*own.py:{line}\) cannot take \(self, run, metrics\); correct it"
    with pytest.raises(ConfigError, match=f"train.callbacks: {own}:{said}"):
        callback_class(f"{own}:TakesTooLittle")
    with pytest.raises(ConfigError, match=f"callbacks: {said}"):
        callbacks_of(RunConfig(), [load_object("own", f"{own}:TakesTooLittle")()])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("own.py:fails", [], r"recipe own.py:fails: KeyError: 'no such' in line 31; correct the file"),
        ("own.py:no_config", [], "returned dict; return a RunConfig"),
        ("own.py:misspells", [], "sets stepss, which TrainConfig does not have; did you mean steps"),
        ("own.py:needs_data", [], "it needs a value for root; give root=…"),
        ("own.py:own", ["factr=2"], "factr: no such setting; did you mean factor"),
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


# ---- what is wrong with a function is said before the model is built

FUNCTIONS = """
def fails(log_probs):
    return log_probs.no_such_thing()

def asks_for_logits(logits):
    return logits.sum()

def no_sum(log_probs):
    return log_probs

def takes_a_name(log_probs):
    return -log_probs.sum(), {"loss": 1.0}

def no_gradient(labels):
    return labels.sum().float()

number = 3
"""


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "fails",
            "AttributeError: 'Tensor' object has no attribute 'no_such_thing' in line 3; correct the file",
        ),
        ("asks_for_logits", "it asks for logits; a loss can have log_probs, logsumexp, entropies"),
        ("no_sum", "return a sum"),
        ("takes_a_name", "loss is a metric of every step"),
        ("no_gradient", "its sum has no gradient"),
        ("number", "is a int; give a function"),
        ("focus", "own.py has no focus; known are fails"),
    ],
)
def test_a_function_that_is_no_loss_is_refused(tmp_path, name, message):
    from megatron_vlm.objectives import objective_of

    (tmp_path / "own.py").write_text(FUNCTIONS)
    config = RunConfig()
    config.train.objective = f"{tmp_path}/own.py:{name}"
    with pytest.raises(ConfigError, match="train.objective: .*own.py") as raised:
        objective_of(config)
    assert message in str(raised.value)
