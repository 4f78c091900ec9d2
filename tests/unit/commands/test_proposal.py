"""`train --model … --data …`: the recipe that is made, and that a run starts from it."""

import json
import re

import programs
import pytest
from programs import TYPED, ask, run_program
from sources import write_sharegpt

from megatron_vlm.config import RunConfig
from megatron_vlm.overrides import from_yaml
from megatron_vlm.recipes.proposal import as_recipe, changes, propose
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.validate import validate


def proposal(model: str, processes: int, has_gpu: bool = True, **said) -> RunConfig:
    chosen = {"model.hf_path": str(CONFIGS / f"{model}.json"), "data.train_data_path": "pictures.jsonl"}
    chosen |= {key.replace("__", "."): value for key, value in said.items()}
    return propose(chosen, processes, has_gpu)


@pytest.mark.parametrize(
    ("model", "processes", "ep"), [("gemma3_vl_4b", 8, 1), ("qwen3_vl_30b_a3b", 6, 2), ("glm_45v", 8, 8)]
)
def test_experts_are_spread_and_the_batch_is_divided(model, processes, ep):
    config = proposal(model, processes)
    validate(config, processes)
    assert (config.parallel.ep, config.model.recompute, config.model.dtype) == (ep, "full", "bf16")
    assert config.train.global_batch_size % processes == 0


def test_the_file_is_the_recipe():
    config = proposal("gemma3_vl_4b", 8, train__steps="7")
    text = as_recipe(config, "megatron-vlm train")
    assert from_yaml(text) == config and config.train.steps == 7
    assert proposal("gemma3_vl_4b", 8).train.epochs == 1
    assert text.startswith("# Made by `megatron-vlm train`") and "  train_data_path: pictures.jsonl\n" in text


def test_a_run_without_a_recipe_saves_on_the_way_and_uses_validation_data():
    train = proposal("gemma3_vl_4b", 1).train
    assert (train.save_every, train.eval_every) == (500, 0)
    train = proposal("gemma3_vl_4b", 1, data__validation_share="0.1", train__save_every="7").train
    assert (train.save_every, train.eval_every) == (7, 500)


def test_the_first_path_tells_the_type_of_the_data(tmp_path):
    (tmp_path / "shards/.nv-meta").mkdir(parents=True)
    (tmp_path / "shards/.nv-meta/.info.json").write_text("{}")
    for data, kind in ((f"{tmp_path}/shards*2", "energon"), ("a.jsonl", "hf")):
        chosen = {"model.hf_path": "m", "data.train_data_path": [data]}
        assert propose(chosen, 1, has_gpu=False).data.dataset_type == kind


def test_going_on_may_change_where_a_run_ends_but_not_its_model_data_or_rates():
    recipe = as_recipe(proposal("gemma3_vl_4b", 1, train__steps="7"), "megatron-vlm train")
    longer = {"train__steps": "9", "train__save_every": "2", "logging__log_every": "5"}
    assert changes(recipe, proposal("gemma3_vl_4b", 8, **longer)) == []
    assert changes(recipe, proposal("gemma3_vl_4b", 1, data__train_data_path="b.jsonl")) == [
        "data.train_data_path is 'pictures.jsonl' there and 'b.jsonl' here"
    ]
    assert len(changes(recipe, proposal("gemma3_vl_12b", 1, optimizer__lr="1"))) == 2


@pytest.mark.long
def test_one_command_trains_and_goes_on(tmp_path, tiny_gemma3):
    data = write_sharegpt(tmp_path / "chat", 12)
    run = tmp_path / "run"
    line = ["train", "--model", str(tiny_gemma3), "--data", str(data), f"--run_dir={run}", "num_workers=0"]
    line += ["global_batch_size=4", "data.max_drop_share=1"]
    first = ask(*TYPED, *line, "steps=2")  # which ends as Python does, with what libraries say then
    assert first.returncode == 0 and "nanobind" not in first.stderr, first.stderr
    assert from_yaml(first.stdout.partition("wrote ")[0]).train.steps == 2
    further = run_program(programs.COMMAND, *line, "steps=3")
    assert further.returncode == 0 and "resumed after step 2" in further.stdout, further.stderr
    other = [str(write_sharegpt(tmp_path / "other", 12)) if word == str(data) else word for word in line]
    refused = run_program(programs.COMMAND, *other, "steps=4")
    assert refused.returncode == 2
    assert f"data.train_data_path is '{data}' there and '{tmp_path}/other" in refused.stderr
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


@pytest.mark.long
def test_other_commands_need_no_recipe_either(tmp_path, tiny_gemma3):
    data = write_sharegpt(tmp_path / "chat", 12)
    flags = ["--model", tiny_gemma3, "--data", data, f"--run_dir={tmp_path}/run"]
    preview = ["preview", *flags, "--output", tmp_path / "page.html", "data.max_drop_share=1"]
    for words, says in (
        (["plan", "--model", tiny_gemma3], "on 1 GPU: tp 1"),
        (preview, "12 samples"),
        (["import", *flags], ""),
        (["train", *flags, "steps=1", "num_workers=0", "data.max_drop_share=1"], "resumed after step 0"),
    ):
        ended = run_program(programs.COMMAND, *words)
        assert ended.returncode == 0 and says in ended.stdout, (words, ended)
    preview = [*preview[:-3], "--output", tmp_path / "other.html", "--json", preview[-1]]
    answer = run_program(programs.COMMAND, *preview)
    assert json.loads(answer.stdout)["lengths"]["tokens of a sample"]["least"] > 1, answer
    quiet = run_program(programs.COMMAND, "train", "-q", *words[1:-3], "steps=2", *words[-2:])
    assert quiet.returncode == 0 and not re.search(
        "wrote|resumed|step 2/2|loss|importing|parameters", quiet.stdout + quiet.stderr
    )
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
