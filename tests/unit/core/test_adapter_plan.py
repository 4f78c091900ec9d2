"""`plan` counts gradients and optimizer states of adapters alone, and a rehearsed step needs what it says."""

from __future__ import annotations

import json

import pytest
from pairs import first_soon
from places import ROOT

from megatron_vlm.extras.plan.plan import RESERVE, make_plan
from megatron_vlm.extras.plan.rehearsal import rehearse
from megatron_vlm.models.description import Description
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.recipes import compose
from megatron_vlm.recipes.published import CONFIGS

WORST = 0.1  # between the planned and the rehearsed
LISTED = ["adapter.target_modules=[q_proj,down_proj]", "adapter.exclude_modules=.*vision.*"]


def of_layers(count: int, model: str) -> Description:
    """The published model, cut to its first layers, as is Gemma3's tower."""
    hf_config = load_config(CONFIGS / f"{model}.json")
    if model.startswith("gemma3"):
        hf_config.vision_config.num_hidden_layers = count
    text = hf_config.text_config
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    return describe(hf_config)


@pytest.mark.parametrize(
    ("settings", "trained"),
    first_soon(
        [
            # rank 16; 6 layers of 2,560 channels, 8 query and 4 key/value heads of 256, 10,240 inner channels
            (["tp=1"], 6 * 16 * (2560 * 5 + 2048 * 2 + 1024 * 2 + 10240 * 3 + 2560 * 2)),
            # a rank of two holds half of B of q and of A of down
            (["tp=2", *LISTED], 6 * 16 * (2560 + 2048 // 2 + 10240 // 2 + 2560)),
            # and of a layer's feed-forward, which then has no adapter
            (
                ["tp=2", *LISTED, "adapter.modules_to_save=[language_model.layers.1.mlp]"],
                6 * 16 * (2560 + 2048 // 2) + 5 * 16 * (10240 // 2 + 2560) + 3 * 2560 * 10240 // 2,
            ),
        ]
    ),
)
def test_what_is_trained_is_what_adapters_hold(settings, trained):
    """Of the first six layers, the last of which has no window."""
    file = ROOT / "recipes/gemma3_vl_4b_lora.yaml"
    run = compose(file=file, settings=settings, arguments={"train_data_path": "none://"})
    description = of_layers(6, "gemma3_vl_4b")
    gpus = run.parallel.tp
    [stage] = make_plan(run, description, gpus).stages
    assert (stage.gradients, stage.optimizer) == (4 * trained, 12 * trained)
    rehearsed = rehearse(run, description, gpus, 0)
    assert rehearsed.gradients == pytest.approx(stage.gradients, rel=1e-3)  # buffers are padded
    assert stage.memory - RESERVE == pytest.approx(rehearsed.peak, rel=WORST)


def test_the_plan_of_every_model_has_the_memory_of_its_rehearsals():
    rows = json.loads((ROOT / "reports/rehearsal_lora.json").read_text(encoding="utf-8"))
    models = {config.stem for config in CONFIGS.glob("*.json")}
    for trained in ("lora", "full"):
        assert {row["model"] for row in rows if row["trained"] == trained} == models
    assert not [row for row in rows if abs(row["plan_over_rehearsed"] - 1) > WORST]


@pytest.mark.long
def test_a_rank_holds_adapters_of_its_experts_alone():
    """Rank 16; 8 layers, 128 experts of 768 inner channels in 2,048: 64 of them on a rank of two."""
    file = ROOT / "recipes/qwen3_vl_30b_a3b_lora.yaml"
    experts = ["adapter.target_parameters=[experts.gate_up_proj,experts.down_proj]"]
    settings = ["ep=2", *experts, "adapter.target_modules=[]"]
    run = compose(file=file, settings=settings, arguments={"train_data_path": "none://"})
    description = of_layers(8, "qwen3_vl_30b_a3b")
    trained = 8 * 64 * 16 * (2048 + 2 * 768 + 768 + 2048)
    [stage] = make_plan(run, description, 2).stages
    assert (stage.gradients, stage.optimizer) == (4 * trained, 12 * trained)
    rehearsed = rehearse(run, description, 2, 0)
    assert rehearsed.gradients == pytest.approx(stage.gradients, rel=1e-3)  # buffers are padded
    assert stage.memory - RESERVE == pytest.approx(rehearsed.peak, rel=WORST)
