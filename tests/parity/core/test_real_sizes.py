"""Every real-size recipe builds in its own layout on the meta device, with exactly the model's parameters."""

from __future__ import annotations

import functools

import pytest

from megatron_vlm.recipes.published import CONFIGS
from tiny.distributed import run_distributed

PARAMETERS = {  # of the published models, tied output weights counted once
    "gemma3_vl_4b": 4_300_079_472,
    "gemma3_vl_12b": 12_187_325_040,
    "gemma3_vl_27b": 27_432_406_640,
    "gemma4_31b": 31_273_086_512,
    "gemma4_26b_a4b": 25_805_933_872,
    "ministral3_3b": 3_849_090_048,
    "ministral3_8b": 8_918_026_240,
    "ministral3_14b": 13_945_031_680,
    "siglip2_llama31_8b": 8_465_209_072,
    "siglip2_qwen3_4b": 4_453_482_224,
    "mistral_small_3_24b": 24_011_361_280,
    "mistral_small_4_119b": 119_401_298_944,
    "kimi_k25_1t_a32b": 1_026_879_353_328,
    "llava15_7b": 7_063_427_072,
    "llava15_13b": 13_351_494_656,
    "llava_onevision_05b": 893_675_552,
    "llava_onevision_7b": 8_030_807_584,
    "llava_onevision_72b": 73_181_570_592,
    "internvl35_1b": 1_060_897_792,
    "internvl35_4b": 4_732_489_216,
    "internvl35_8b": 8_528_318_464,
    "internvl35_14b": 15_119_523_840,
    "lightonocr_1b": 1_005_647_872,
    "qianfan_ocr_4b": 4_732_489_216,
    "smolvlm2_256m": 256_484_928,
    "smolvlm2_500m": 507_482_304,
    "smolvlm2_2b": 2_246_784_880,
    "glm_45v": 107_710_927_360,
    "glm_41v_9b": 10_292_777_472,
    "glm_46v_flash": 10_292_777_472,
    "qwen2_vl_2b": 2_208_985_600,
    "qwen2_vl_7b": 8_291_375_616,
    "qwen2_vl_72b": 73_405_560_320,
    "qwen25_vl_3b": 3_754_622_976,
    "qwen25_vl_7b": 8_292_166_656,
    "qwen25_vl_32b": 33_452_718_336,
    "qwen25_vl_72b": 73_410_777_344,
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_235b_a22b": 235_670_022_896,
}

# the weights hold an output layer of its own, which config.json does not say: see `models.weights.files`
UNTIED = ("ministral3_8b", "ministral3_14b", "mistral_small_3_24b")
# one of each family, and in `make test-soak` the other sizes; those of a group are counted by one process
OFTEN = (
    "gemma3_vl_4b",
    "ministral3_8b",
    "siglip2_llama31_8b",
    "glm_45v",
    "qwen25_vl_3b",
    "qwen3_vl_2b",
    "qwen3_vl_30b_a3b",
    "llava15_7b",
    "internvl35_1b",
    "llava_onevision_05b",
    "smolvlm2_256m",
)
OTHERS = tuple(name for name in PARAMETERS if name not in OFTEN)
RECIPES = [pytest.param(name, OFTEN, marks=pytest.mark.soak) for name in OFTEN]
RECIPES += [pytest.param(name, OTHERS, marks=pytest.mark.soak) for name in OTHERS]


def count(recipe: str, config: str, untied: bool) -> dict:
    from megatron_vlm.config import fewest_processes
    from megatron_vlm.extras.plan.plan import make_plan
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.hf import load_config
    from megatron_vlm.recipes import load_recipe

    run, hf_config = load_recipe(recipe)(train_data_path="none://"), load_config(config)
    hf_config.tie_word_embeddings &= not untied
    processes = fewest_processes(run.parallel)
    counts = list(filter(None, (count_on(rank, processes, run, hf_config) for rank in range(processes))))
    plan = make_plan(run, describe(hf_config), processes)
    return {
        "total": sum(total for total, _, _ in counts),
        "held": [held for _, held, _ in counts],
        "planned": [plan.stages[stage].parameters for _, _, stage in counts],
    }


def count_on(rank: int, processes: int, run, hf_config) -> tuple[int, int, int] | None:
    import torch

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.models.weights.rules import Whole, find_rule, named_global_weights
    from megatron_vlm.parallel import setup

    def parameters(weight: torch.Tensor) -> torch.Tensor | None:
        return weight if isinstance(weight, torch.nn.Parameter) else None

    description = describe(hf_config)
    rules, total, held = description.rules, 0, 0
    with setup.pretend_rank(run.parallel, processes, rank):
        ps = setup.parallel_state
        if ps.get_data_parallel_rank() or ps.get_tensor_model_parallel_rank():
            return None  # as large as the first
        with torch.device("meta"):
            chunks = build_model(run, description, torch.device("meta"))
        stage = ps.get_pipeline_model_parallel_rank()
        for chunk in chunks:
            for name, param in named_global_weights(chunk, parameters):
                held += param.numel()
                rule, _ = find_rule(rules, name)
                if rule.export:
                    whole = isinstance(rule.operation, Whole)
                    ranks = run.parallel.ep if ".experts." in name else 1 if whole else run.parallel.tp
                    total += ranks * param.numel()
    return total, held, stage


def all_counts(jobs: dict[str, tuple[str, bool]]) -> dict[str, dict]:
    return {recipe: count(recipe, *job) for recipe, job in jobs.items()}


@functools.cache
def counts(names: tuple[str, ...]) -> dict[str, dict]:
    """Computed in a process of its own, as pretending changes Megatron's state."""
    jobs = {name: (str(CONFIGS / f"{name}.json"), name in UNTIED) for name in names}
    return run_distributed(1, all_counts, jobs, timeout=900)[0]


@pytest.mark.parametrize(("recipe", "group"), RECIPES)
def test_recipes_hold_the_published_parameters_as_the_plan_says(recipe, group):
    found = counts(group)[recipe]
    assert found["total"] == PARAMETERS[recipe] and found["held"] == found["planned"]


@pytest.mark.parametrize(("recipe", "group"), RECIPES)
def test_configs_have_the_published_parameters(recipe, group):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from megatron_vlm.models.families import describe

    config = AutoConfig.from_pretrained(CONFIGS / f"{recipe}.json")
    config.tie_word_embeddings &= recipe not in UNTIED
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    carries = describe(config).weight_map.carries
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if not carries(name)) == PARAMETERS[recipe]
