import subprocess
import sys

import pytest
from places import ROOT

from megatron_vlm.config import ConfigError, fewest_processes
from megatron_vlm.recipes import RECIPES, compose, load_recipe
from megatron_vlm.recipes.published import DEMO
from megatron_vlm.validate import validate

RUN_FILES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_on_the_processes_its_layout_needs(name):
    config = load_recipe(name)(train_data_path="/data")
    validate(config, fewest_processes(config.parallel))
    assert config.run_dir == f"runs/{config.name}" + "/run" * name.endswith(DEMO)
    assert RECIPES[name].summary.endswith(".")


def test_arguments_set_their_settings():
    config = load_recipe("gemma3_vl_4b")(
        dataset_type="hf", train_data_path="/data", tp=4, pp=2, seq_length=512, freeze=["tower"], name="mine"
    )
    assert (config.data.dataset_type, config.data.train_data_path) == ("hf", "/data")
    assert (config.parallel.tp, config.parallel.pp, config.data.seq_length) == (4, 2, 512)
    assert (config.model.freeze, config.run_dir) == (["tower"], "runs/mine")


def test_unknown_recipe_and_argument_come_with_a_suggestion():
    with pytest.raises(
        ConfigError, match=r"^gemma3_4b: no such recipe; did you mean gemma3_vl_4b or gemma4_e4b\?$"
    ):
        load_recipe("gemma3_4b")
    with pytest.raises(ConfigError, match="^no: no such recipe; `megatron-vlm recipes` lists them.$"):
        load_recipe("no")
    with pytest.raises(ConfigError, match=r"^seq_len: no such setting; did you mean seq_length\?$"):
        load_recipe("gemma3_vl_4b")(seq_len=5)


def test_recipes_import_no_torch():
    code = (
        "import sys; from megatron_vlm.recipes import RECIPES, load_recipe\n"
        "for name in RECIPES: load_recipe(name)()\n"
        "assert 'megatron_vlm.recipes.published' in sys.modules\n"
        "sys.exit(any(heavy in sys.modules for heavy in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_ready_experiment_is_valid(file):
    config = compose(file=file, arguments={"train_data_path": "/data"})
    validate(config, 64)
    assert config.name == file.stem


def test_command_line_goes_over_the_file_and_the_file_over_the_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "recipe: gemma3_vl_12b\nargs: {lr: 1e-4, tp: 2}\noverrides: {train.steps: 5, train.seed: 6}"
    )
    config = compose(file=file, settings=["tp=8", "steps=7", "optimizer.beta2=0.99"])
    assert (config.parallel.tp, config.train.steps, config.optimizer.beta2) == (8, 7, 0.99)
    assert (config.optimizer.lr, config.train.seed) == (1e-4, 6)
    assert config.model.hf_path == "google/gemma-3-12b-it"


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (["steps=10", "train.steps=20"], {}),
        (["train.steps=20"], {"steps": 10}),
        (["steps=20"], {"steps": 10}),
    ],
)
def test_a_setting_said_twice_is_said_once_or_refused(settings, arguments):
    with pytest.raises(ConfigError, match="both set train.steps; give one of them"):
        compose("gemma3_vl_4b", settings=settings, arguments=arguments)
    assert compose("gemma3_vl_4b", settings=["steps=20", "train.steps=20"]).train.steps == 20
    assert compose("gemma3_vl_4b", settings=["tp=2"], assumed={"tp": 1}).parallel.tp == 2


@pytest.mark.parametrize("steps", ["steps=10", "train.steps=10"])
def test_a_short_run_has_a_short_warm_up(steps):
    config = compose("gemma3_vl_4b", settings=[steps])
    assert (config.train.steps, config.optimizer.warmup_steps) == (10, 1)
    assert compose("gemma3_vl_4b", settings=[steps, "warmup_steps=5"]).optimizer.warmup_steps == 5


def test_a_runs_own_config_can_be_given_back(tmp_path):
    from megatron_vlm.overrides import to_yaml

    config = load_recipe("gemma3_vl_4b")(train_data_path="/data", steps=3)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose(file=tmp_path / "config.yaml") == config
    assert compose(file=tmp_path / "config.yaml", settings=["tp=1"]).parallel.tp == 1


def test_data_of_the_command_line_says_its_type_itself(tmp_path):
    """A recipe is for Energon data; with a JSONL file no flag more is needed, and a given type stays."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    flags = {"train_data_path": str(rows)}
    assert compose("gemma3_vl_4b", arguments=flags).data.dataset_type == "hf"
    assert compose("gemma3_vl_4b", arguments={}).data.dataset_type == "energon"
    assert compose("gemma3_vl_4b", None, ["dataset_type=energon"], flags).data.dataset_type == "energon"
    run_file = tmp_path / "run.yaml"
    run_file.write_text("recipe: gemma3_vl_4b\n")
    assert compose(None, run_file, (), flags).data.dataset_type == "hf"
    run_file.write_text("recipe: gemma3_vl_4b\noverrides:\n  data.dataset_type: energon\n")
    assert compose(None, run_file, (), flags).data.dataset_type == "energon"
