"""What `plan` says without a GPU is what the model really holds and does."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

from megatron_vlm.cli import app, run
from megatron_vlm.config import ConfigError, ParallelConfig, RunConfig
from megatron_vlm.models import costs
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.models.layers.attention_sizes import LatentHeads
from megatron_vlm.parallel.layout import pipeline_layout
from megatron_vlm.recipes import load_recipe
from megatron_vlm.recipes.published import CONFIGS
from tiny.distributed import run_distributed

DENSE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 224,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 16,
    "activation_func": silu,
    "vocab_size": 96,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_layer_freq": [1, 1],
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
}
ARCHITECTURES = {
    "dense": DENSE,
    "q/k norms": DENSE | {"qk_layernorm": True},
    "norms after": DENSE | {"qk_layernorm": True, "norm_after_sublayer": True},
    "experts": DENSE | EXPERTS,
    "latent attention": DENSE
    | {"latent_heads": LatentHeads(40, 24, plain=8, turned=16, value=8), "kv_channels": 24}
    | {"num_query_groups": 8, "softmax_scale": 24**-0.5},
}


def layers_of(layout: list[list[str]]) -> list[int]:
    return [stage.count("decoder") for stage in layout]


def test_layers_are_placed_around_tower_and_output():
    assert layers_of(pipeline_layout(34, 0, 0, ParallelConfig())) == [34]
    assert layers_of(pipeline_layout(12, 2, 1, ParallelConfig(pp=3))) == [3, 5, 4]
    assert layers_of(pipeline_layout(6, 9, 0, ParallelConfig(pp=2))) == [1, 5]
    # rank 0 holds the first and the third part, rank 1 the second and the last
    assert layers_of(pipeline_layout(8, 2, 0, ParallelConfig(pp=2, vpp=2))) == [1, 3, 2, 2]


@pytest.mark.parametrize(("name", "of_an_image"), [("internvl35_1b", 2 / 5), ("qwen2_vl_2b", 1)])
def test_tiles_are_spread_over_ranks_and_other_images_stay_whole(name, of_an_image):
    """Four ranks, and 1.6 images in a row; one of InternVL has five tiles."""
    run = load_recipe(name)(train_data_path="none", tp=4)
    hf_config = load_config(CONFIGS / f"{name}.json")
    image = costs.image_cost(run, describe(hf_config))
    assert costs.images_per_row(run, image) == pytest.approx(1.6, abs=0.03)
    assert costs.images_per_tower(run, image) == pytest.approx(of_an_image)


def test_first_and_last_stage_hold_embedding_and_loss():
    layout = pipeline_layout(4, 0, 0, ParallelConfig(pp=2))
    assert layout == [["embedding", "decoder", "decoder"], ["decoder", "decoder", "loss"]]


def _one_layer(architectures: dict[str, dict]) -> dict[str, tuple[float, ...]]:
    """(operations of matrix products, their count) for each token."""
    from megatron_vlm.models.head import output_losses
    from megatron_vlm.models.language_model import LanguageModel, language_model_config
    from megatron_vlm.models.layers.fused import Rotary
    from megatron_vlm.models.layers.kernel_checks import attention_backends
    from megatron_vlm.models.stream import StreamLayout
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), 1)
    rows, length, found = 2, 64, {}
    batch = {
        "input_ids": torch.zeros(rows, length, dtype=torch.long),
        "position_ids": torch.arange(length).expand(rows, length),
        "attention_mask": torch.ones(rows, length).int(),
        "labels": torch.zeros(rows, length, dtype=torch.long),
        "loss_mask": torch.ones(rows, length),
        "visual_inputs": None,
    }
    layout = StreamLayout(batch, np.zeros_like, False, 1)
    stream = layout.stream(0, rows * length, {None}, setup.device())
    for name, architecture in architectures.items():
        counted = []
        for layers in (1, 2):
            cut = architecture | {"num_layers": layers}
            if "moe_layer_freq" in cut:
                cut["moe_layer_freq"] = cut["moe_layer_freq"][:layers]
            run = RunConfig()
            run.model.load_weights = False
            config = language_model_config(run, cut, (layers, 0, 0))
            config.attention_backends = attention_backends(config, run.model, torch.device("cpu"))
            model = LanguageModel(config, Rotary([(torch.ones(8), 1.0)]), True, True, None)
            hidden = torch.randn(rows * length, 1, 64, dtype=torch.bfloat16, requires_grad=True)
            with FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
                model.outputs(stream, hidden, output_losses)
            counted.append(counter.get_flop_counts()["Global"])
        products = [sum(n for op, n in of.items() if "attention" not in str(op)) for of in counted]
        tokens = rows * length
        scores = 4 * 8 * 16 * (length + 1) / 2
        found[name] = (
            (products[1] - products[0]) / tokens,
            costs.layer_flops(architecture, 1, length) - scores,
        )
    setup.shutdown()
    return found


def grouped(a_shape, b_shape, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]


GROUPED = {torch.ops.aten._grouped_mm: grouped}  # torch 2.15 does not count it


@pytest.fixture(scope="module")
def measured():
    return run_distributed(1, _one_layer, ARCHITECTURES)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layer_does_the_operations_that_are_counted(measured, name):
    done, counted = measured[name]
    assert counted == done


def plan(capsys, tmp_path, recipe: str, *settings: str) -> str:
    shutil.copy(CONFIGS / f"{recipe}.json", tmp_path / "config.json")
    with pytest.raises(SystemExit) as ended:
        run(app, "megatron-vlm", ["plan", "--recipe", recipe, f"hf_path={tmp_path}", *settings])
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


def test_plan_of_a_layout_that_fits(capsys, tmp_path):
    text = plan(capsys, tmp_path, "glm_45v", "tp=4", "pp=8", "ep=8")
    assert text.startswith("glm_45v on 64 GPUs: tp 4 · pp 8 · ep 8 · dp 2; 32 micro batches")
    assert "It fits: the fullest rank, of stage" in text
    layers = [line.split()[1] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert len(layers) == 8 and layers[0].startswith("0-") and layers[-1].endswith("-45")


def test_plan_as_json_has_the_same_numbers(capsys, tmp_path):
    table = json.loads(plan(capsys, tmp_path, "glm_45v", "tp=4", "pp=8", "ep=8", "--json"))
    assert (table["gpus"], table["data_parallel"], table["fits"]) == (64, 2, True)
    assert table["memory"] == max(stage["memory"] for stage in table["stages"]) < table["capacity"] == 80e9
    assert table["stages"][0]["layers"][0][0] == 0


def test_plan_says_what_makes_it_fit(capsys, tmp_path):
    text = plan(capsys, tmp_path, "qwen3_vl_8b", "tp=1")
    assert "does not fit" in text and "`plan --gpus N --search` finds layouts" in text


def test_virtual_stages_have_each_layer_once():
    from megatron_vlm.extras.plan.plan import make_plan

    run = load_recipe("qwen3_vl_2b")(train_data_path="x", tp=1, pp=2, vpp=2)
    stages = make_plan(run, describe(load_config(CONFIGS / "qwen3_vl_2b.json")), 2).stages
    layers = [layer for stage in stages for part in stage.layers for layer in part]
    assert sorted(layers) == list(range(28)) and [len(stage.layers) for stage in stages] == [2, 2]


def test_plan_refuses_what_does_not_divide(tmp_path):
    from transformers import AutoConfig

    from megatron_vlm.extras.plan.plan import make_plan
    from megatron_vlm.recipes import load_recipe

    hf_config = AutoConfig.from_pretrained(CONFIGS / "qwen3_vl_8b.json")
    description = describe(hf_config)
    recipe = load_recipe("qwen3_vl_8b")
    with pytest.raises(ConfigError, match="does not divide 12 processes"):
        make_plan(recipe(train_data_path="x", tp=8), description, 12)
    with pytest.raises(ValueError, match="tp = 16 does not divide the model's 8 key/value heads"):
        make_plan(recipe(train_data_path="x", tp=16), description, 16)
    with pytest.raises(ValueError, match="64 stages are more than the model's 36 layers; lower pp or vpp"):
        make_plan(recipe(train_data_path="x", tp=1, pp=32, vpp=2), description, 32)
    description.text.num_attention_heads, description.text.num_key_value_heads = 36, 3
    with pytest.raises(ValueError, match="tp = 2 does not divide the model's 3 key/value heads; change tp"):
        make_plan(recipe(train_data_path="x", tp=2), description, 2)


def best_utilisations(cases: list[tuple[str, int]]) -> list[float]:
    """Of the quickest layouts on GPUs of 80 GB, by the model of time."""
    from megatron_vlm.extras.plan.search import planned_layouts
    from plan_recipes import estimated_utilisation

    found = []
    for name, gpus in cases:
        description = describe(load_config(CONFIGS / f"{name}.json"))
        layouts = planned_layouts(load_recipe(name)(train_data_path="none"), description, gpus, 80e9)
        found.append(estimated_utilisation(layouts[0][1]))
    return found


@pytest.mark.long
def test_published_sizes_are_modelled_to_use_a_card():
    cases = {("qwen3_vl_8b", 1): 0.42, ("qwen3_vl_8b", 8): 0.48, ("qwen3_vl_30b_a3b", 16): 0.25}
    [found] = run_distributed(1, best_utilisations, list(cases))
    for (case, least), utilisation in zip(cases.items(), found, strict=True):
        assert least <= utilisation < 0.7, case  # products alone have 0.7


def utilisations_of_lengths(name: str) -> list[float]:
    """Of rows of three lengths."""
    from megatron_vlm.extras.plan.plan import make_plan
    from plan_recipes import estimated_utilisation

    description = describe(load_config(CONFIGS / f"{name}.json"))
    runs = [load_recipe(name)(train_data_path="none", seq_length=length) for length in (256, 4096, 65536)]
    return [estimated_utilisation(make_plan(run, description, 1)) for run in runs]


@pytest.mark.long
def test_short_rows_wait_for_the_host_and_long_ones_for_attention():
    [[short, usual, long]] = run_distributed(1, utilisations_of_lengths, "internvl35_1b")
    assert short < usual > long
