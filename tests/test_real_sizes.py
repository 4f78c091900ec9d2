"""Every real-size recipe builds in its own layout on the meta device, with exactly the model's parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parent / "hf_configs"
PARAMETERS = {  # of the published models, tied output weights counted once
    "gemma3_vl_4b": ("gemma3_4b.json", 4_300_079_472),
    "gemma3_vl_12b": ("gemma3_12b.json", 12_187_325_040),
    "gemma3_vl_27b": ("gemma3_27b.json", 27_432_406_640),
    "ministral3_3b": ("ministral3_3b.json", 3_849_090_048),
    "ministral3_8b": ("ministral3_8b.json", 8_918_026_240),
    "ministral3_14b": ("ministral3_14b.json", 13_945_031_680),
    "glm_45v": ("glm_45v.json", 107_710_927_360),
    "qwen25_vl_3b": ("qwen2_5_vl_3b.json", 3_754_622_976),
    "qwen25_vl_7b": ("qwen2_5_vl_7b.json", 8_292_166_656),
    "qwen25_vl_32b": ("qwen2_5_vl_32b.json", 33_452_718_336),
    "qwen25_vl_72b": ("qwen2_5_vl_72b.json", 73_410_777_344),
    "qwen3_vl_2b": ("qwen3_vl_2b.json", 2_127_532_032),
    "qwen3_vl_4b": ("qwen3_vl_4b.json", 4_437_815_808),
    "qwen3_vl_8b": ("qwen3_vl_8b.json", 8_767_123_696),
    "qwen3_vl_32b": ("qwen3_vl_32b.json", 33_357_390_064),
    "qwen3_vl_30b_a3b": ("qwen3_vl_30b_a3b.json", 31_070_754_032),
    "qwen3_vl_235b_a22b": ("qwen3_vl_235b_a22b.json", 235_670_022_896),
}

COUNT = """
import json, sys
import torch
from transformers import AutoConfig

from megatron_vlm.config import fewest_processes
from megatron_vlm.models.families import family_for
from megatron_vlm.models.vlm import build_model
from megatron_vlm.models.weights import Whole, find_rule, named_global_weights
from megatron_vlm.parallel import setup
from megatron_vlm.planning import make_plan
from megatron_vlm.recipes import load_recipe


def count(recipe, config):
    run, hf_config = load_recipe(recipe)(train_data_path="none://"), AutoConfig.from_pretrained(config)
    processes = fewest_processes(run.parallel)
    counts = [count_on(rank, processes, run, hf_config) for rank in range(processes)]
    plan = make_plan(run, hf_config, processes)
    return {
        "total": sum(total for total, _, _ in counts),
        "held": [held for _, held, _ in counts],
        "planned": [plan.stages[stage].parameters for _, _, stage in counts],
    }


def count_on(rank, processes, run, hf_config):
    family = family_for(hf_config)
    rules, total, held = family.weights(hf_config), 0, 0
    with setup.pretended(run.parallel, processes, rank):
        with torch.device("meta"):
            chunks = build_model(run, family, hf_config, torch.device("meta"))
        first_replica = setup.parallel_state.get_data_parallel_rank() == 0
        tp_rank = setup.parallel_state.get_tensor_model_parallel_rank()
        stage = setup.parallel_state.get_pipeline_model_parallel_rank()
        for chunk in chunks:
            for name, param in named_global_weights(chunk):
                if not isinstance(param, torch.nn.Parameter):
                    continue
                held += param.numel()
                rule, _ = find_rule(rules, name)
                if first_replica and rule.export and not (tp_rank > 0 and isinstance(rule.operation, Whole)):
                    total += (run.parallel.ep if ".local_experts." in name else 1) * param.numel()
    return total, held, stage


print(json.dumps({recipe: count(recipe, config) for recipe, config in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def counts() -> dict[str, dict]:
    jobs = json.dumps({recipe: str(CONFIGS / config) for recipe, (config, _) in PARAMETERS.items()})
    result = subprocess.run([sys.executable, "-c", COUNT, jobs], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_parameters_over_all_ranks_are_the_models(counts, recipe):
    assert counts[recipe]["total"] == PARAMETERS[recipe][1]


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_every_rank_holds_what_the_plan_says(counts, recipe):
    assert counts[recipe]["held"] == counts[recipe]["planned"]


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_configs_have_the_published_parameters(recipe):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config, published = PARAMETERS[recipe]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIGS / config))
    assert sum(parameter.numel() for parameter in model.parameters()) == published
