"""`train --model … --data …`: the recipe that is made, and that a run starts from it."""

import json

import programs
import pytest
from programs import TYPED, ask, run_program
from sources import write_sharegpt

from megatron_vlm.config import RunConfig
from megatron_vlm.extras.plan.proposal import (
    as_recipe,
    propose,
)
from megatron_vlm.overrides import from_yaml
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.validate import validate


def proposal(model: str, processes: int, has_gpu: bool = True, **said) -> RunConfig:
    chosen = {key.replace("__", "."): value for key, value in said.items()}
    return propose(str(CONFIGS / f"{model}.json"), ["pictures.jsonl"], chosen, processes, has_gpu)


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
        assert propose("m", [data], {}, 1, has_gpu=False).data.dataset_type == kind


@pytest.mark.long
def test_one_command_trains_and_goes_on(tmp_path, tiny_gemma3):
    data = write_sharegpt(tmp_path / "chat", 12)
    run = tmp_path / "run"
    line = ["train", "--model", str(tiny_gemma3), "--data", str(data), f"--run_dir={run}", "num_workers=0"]
    line += ["global_batch_size=4", "data.max_drop_share=1"]
    first = ask(*TYPED, *line, "steps=2")  # which ends as Python does, with what libraries say then
    assert first.returncode == 0 and "nanobind" not in first.stderr, first.stderr
    assert from_yaml(first.stdout.partition("wrote ")[0]).train.steps == 2
    again = run_program(programs.COMMAND, *line, "steps=3")
    assert again.returncode == 2 and "holds another recipe; go on with that by --config" in again.stderr
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("steps: 2", "steps: 3"))
    further = run_program(programs.COMMAND, "train", "--config", file)
    assert further.returncode == 0 and "resumed after step 2" in further.stdout
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
