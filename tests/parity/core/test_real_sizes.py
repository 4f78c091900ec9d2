"""Every real-size recipe builds in its own layout on the meta device, with exactly the model's parameters."""

from __future__ import annotations

import functools

import pytest
from published_parameters import PARAMETERS

from megatron_vlm.recipes.published import CONFIGS
from tiny.distributed import run_distributed

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
