"""`train --model … --data …`: the recipe that is made, and that a run starts from it."""

import functools
import json

import programs
import pytest
from programs import TYPED, ask, run_program
from sources import write_sharegpt

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.config_rules.settings import validate
from megatron_vlm.extras.plan.plan import make_plan
from megatron_vlm.extras.plan.proposal import LR_OF_ADAPTERS, Proposal, propose
from megatron_vlm.extras.plan.proposing import MADE_BY, _write, memory_of_gpus, source_settings
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.overrides import from_yaml
from megatron_vlm.recipes.published import CONFIGS

H100 = 80 * 10**9


@functools.cache  # the search for a layout takes seconds
def proposal(model: str, gpus: int, **said) -> Proposal:
    description = describe(load_config(CONFIGS / f"{model}.json"))
    own = {key.replace("__", "."): value for key, value in said.items()}
    return propose(source_settings(f"google/{model}", ["pictures.jsonl"]), description, [H100] * gpus, own)


@pytest.mark.long
@pytest.mark.parametrize(("model", "gpus"), [("qwen3_vl_2b", 1), ("gemma3_vl_4b", 8), ("gemma3_vl_4b", 6)])
def test_a_layout_is_found_that_fits(model, gpus):
    made = proposal(model, gpus)
    config = made.config()
    validate(config, gpus)
    assert made.processes == gpus and config.model.dtype == "bf16"
    description = describe(load_config(CONFIGS / f"{model}.json"))
    assert make_plan(config, description, gpus).memory <= H100
    assert "that fit on" in made.reasons["parallel.tp"]
    assert config.train.global_batch_size % gpus == 0


def test_the_file_is_the_recipe_with_its_reasons():
    made = proposal("gemma3_vl_4b", 8, train__steps="7")
    text = made.to_yaml("megatron-vlm train")
    assert from_yaml(text) == made.config() and made.config().train.steps == 7
    assert proposal("gemma3_vl_4b", 8).config().train.epochs == 1
    assert "hf_path: google/gemma3_vl_4b  # gemma3, as its config.json says" in text
    assert f"# {made.reasons['parallel.tp']}" in text


def test_what_the_user_says_stays():
    made = proposal("gemma3_vl_4b", 8, parallel__tp=4, name="mine", model__dtype="fp32")
    config = made.config()
    assert (config.parallel.tp, config.model.recompute, config.model.dtype) == (4, "none", "fp32")
    assert config.run_dir == "runs/mine" and "parallel.tp" not in made.reasons


def test_a_setting_that_is_a_mapping_may_be_given_key_by_key():
    patterns = {"adapter.rank_pattern.q_proj": "6", r"adapter.rank_pattern.layers\.0\.v_proj": "2"}
    made = proposal("gemma3_vl_4b", 0, adapter__r="4", optimizer__lr_by_part__lora_B="3e-2", **patterns)
    adapter = made.config().adapter
    assert adapter.rank_pattern == {"q_proj": 6, r"layers\.0\.v_proj": 2}
    assert made.config().optimizer.lr_by_part == {"lora_B": 0.03}
    assert from_yaml(made.to_yaml("megatron-vlm train")) == made.config()


def test_a_run_without_a_recipe_saves_on_the_way_and_uses_validation_data():
    train = proposal("gemma3_vl_4b", 0).config().train
    assert (train.save_every, train.eval_every) == (500, 0)
    train = proposal("gemma3_vl_4b", 0, data__validation_share="0.1", train__save_every="7").config().train
    assert (train.save_every, train.eval_every) == (7, 500)


@pytest.mark.long
def test_a_model_that_fits_nowhere_is_refused_with_ways_out():
    with pytest.raises(
        ConfigError, match=r"trained on a GPU of 80.0 GB, as it needs .*\. Try .*model.freeze"
    ):
        proposal("gemma3_vl_27b", 1)
    assert proposal("gemma3_vl_27b", 1, adapter__r=16).config().adapter.r == 16


@pytest.mark.long
def test_adapters_get_a_learning_rate_of_their_own():
    assert proposal("gemma3_vl_4b", 8).config().optimizer.lr == RunConfig().optimizer.lr
    assert proposal("gemma3_vl_4b", 8, adapter__r="16").config().optimizer.lr == LR_OF_ADAPTERS
    assert proposal("gemma3_vl_4b", 8, adapter__r="16", optimizer__lr=1e-3).config().optimizer.lr == 1e-3


def test_data_of_two_types_is_refused(tmp_path):
    (tmp_path / "shards/.nv-meta").mkdir(parents=True)
    (tmp_path / "shards/.nv-meta/.info.json").write_text("{}")
    assert source_settings("m", [str(tmp_path / "shards")])["data.dataset_type"] == "energon"
    both = source_settings("m", [f"{tmp_path}/shards*2", str(tmp_path / "shards")])
    assert both["data.dataset_type"] == "energon"
    with pytest.raises(ConfigError, match="one run reads one type of data"):
        source_settings("m", ["a.jsonl", str(tmp_path / "shards")])


@pytest.mark.parametrize(
    ("visible", "found"), [(None, [80, 80, 40]), ("2,0", [40, 80]), ("", []), ("GPU-1f,GPU-2e", [80, 80])]
)
def test_gpus_are_those_that_nvidia_smi_and_the_environment_show(tmp_path, monkeypatch, visible, found):
    """With a program in the place of nvidia-smi, which this test's machine need not have."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '80\\n80\\n40\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_of_gpus() == [size << 20 for size in found]


def test_a_kept_recipe_that_another_program_wrote_is_not_replaced(tmp_path):
    file = tmp_path / "recipe.yaml"
    old = tmp_path / "recipe.yaml.old"
    for text in ("mine", MADE_BY + "one`\na: 1\n", MADE_BY + "two`\na: 2\n"):
        file.write_text(text)
        old.write_text("also mine")
        with pytest.raises(ConfigError, match="recipe.yaml.old exists, and this command did not write it"):
            _write(file, MADE_BY + "three`\na: 3\n")
        assert (file.read_text(), old.read_text()) == (text, "also mine")
    old.write_text(MADE_BY + "zero`\n")
    _write(file, MADE_BY + "three`\na: 3\n")
    assert old.read_text() == MADE_BY + "two`\na: 2\n"


@pytest.mark.long
def test_one_command_trains_and_goes_on(tmp_path, tiny_gemma3):
    data = write_sharegpt(tmp_path / "chat", 12)
    run = tmp_path / "run"
    line = ["train", "--model", str(tiny_gemma3), "--data", str(data), f"--run_dir={run}", "num_workers=0"]
    line += ["global_batch_size=4", "data.max_drop_share=1"]
    run.mkdir()
    (run / "recipe.yaml").write_text("# of a run that failed before its first step")
    first = ask(*TYPED, *line, "steps=2")  # which ends as Python does, with what libraries say then
    assert first.returncode == 0 and "nanobind" not in first.stderr, first.stderr
    assert "what was there is" in first.stdout and (run / "recipe.yaml.old").exists()
    assert from_yaml(first.stdout.partition("wrote ")[0]).train.steps == 2
    again = run_program(programs.COMMAND, *line, "steps=3")
    assert again.returncode == 2 and "holds another recipe; go on with that by --config" in again.stderr
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("steps: 2", "steps: 3"))
    further = run_program(programs.COMMAND, "train", "--config", file)
    assert further.returncode == 0 and "resumed after step 2" in further.stdout
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "somewhere"], "--model and --data belong together"),
        (["--model", "m", "--data", "d", "--recipe", "gemma3_vl_4b"], "give --hf_path and --train_data_path"),
        (["--model", "./m", "--data", "d.jsonl"], "model.hf_path: ./m does not exist"),
        (["--model", "m", "--data", "d", "steps=1", "train.steps=2"], "both set train.steps"),
    ],
)
def test_mistakes_are_told_at_once(arguments, message):
    answer = ask(*TYPED, "train", *arguments)
    assert answer.returncode == 2 and message in answer.stderr
    assert len(answer.stderr.splitlines()) <= 2


def test_ranks_of_torchrun_are_sent_to_a_file():
    answer = ask(*TYPED, "train", "--model", "m", "--data", "d", WORLD_SIZE="2", RANK="0")
    assert answer.returncode == 2 and "give it to torchrun's processes as --config FILE" in answer.stderr
