"""Experts: which are chosen, how they weigh, balance in the loss, checkpoints across expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import saved_cases
import torch
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

from megatron_vlm.config import ParallelConfig, RunConfig
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

EXPERT_FAMILIES = ["glm4v_moe", "qwen3_vl_moe", "qwen3_5_moe"]
DTYPES = ["fp32", "bf16"]
COEFFICIENT = 0.5
BALANCED = {  # one layer with experts, whose balance is part of the loss
    "num_hidden_layers": 4,
    "mlp_only_layers": [0, 1, 3],
    "output_router_logits": True,
    "router_aux_loss_coef": COEFFICIENT,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("experts")
    return {family: str(build_tiny_checkpoint(family, folder / family)) for family in EXPERT_FAMILIES}


# ---- the router -------------------------------------------------------------------------------------------


def routes_of_all(paths: dict[str, str], path_of_gemma4: str) -> dict[str, Any]:
    """By family and dtype; those of Gemma 4 are a list by layer."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    found = {family: {dtype: routes(path, dtype) for dtype in DTYPES} for family, path in paths.items()}
    return found | {"gemma4": gemma4_routes(path_of_gemma4)}


def routes(path: str, dtype: str) -> dict[str, torch.Tensor]:
    """Weights (tokens, experts), 0 where not chosen, by Transformers and by us, in the first MoE layer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.layers.moe import FREE_ROUTE
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.parallel import setup

    setup.reset_layout(ParallelConfig(), seed=1)
    hf_config = AutoConfig.from_pretrained(path)
    run = RunConfig()
    run.model.dtype = dtype
    model = build_model(run, describe(hf_config), setup.device())[0]
    ours = model.language_model.decoder.layers[2].mlp.router
    hf_model = AutoModelForImageTextToText.from_pretrained(path, dtype=ours.weight.dtype)
    theirs = hf_model.model.language_model.layers[2].mlp.gate
    with torch.no_grad():
        # as a checkpoint in bf16 has them: since 5.24, Transformers keeps GLM's in fp32 after loading
        theirs.weight.copy_((torch.randn_like(theirs.weight) / 4).to(ours.weight.dtype))
        ours.weight.copy_(theirs.weight)
        if ours.expert_bias is not None:  # as large as scores differ
            theirs.e_score_correction_bias.copy_(torch.randn(8) / 4)
            ours.expert_bias.copy_(theirs.e_score_correction_bias)
        tokens = torch.randn(50, 1, 64, dtype=ours.weight.dtype)
        weights, experts = ours(tokens, torch.full((50, 1, 1, 1), FREE_ROUTE))
        _, chosen_weights, chosen = theirs(tokens)
    trained = ours(tokens, torch.full((50, 1, 1, 1), FREE_ROUTE))
    assert torch.equal(trained[0], weights) and torch.equal(trained[1], experts)
    expected = torch.zeros(50, 8, dtype=chosen_weights.dtype).scatter(1, chosen, chosen_weights)
    return {"ours": torch.zeros(50, 8, dtype=weights.dtype).scatter(1, experts, weights), "theirs": expected}


@pytest.fixture(scope="module")
def routed(checkpoints, tmp_path_factory) -> dict:
    gemma4 = build_tiny_checkpoint("gemma4", tmp_path_factory.mktemp("gemma4"))
    return run_distributed(1, routes_of_all, checkpoints, str(gemma4))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_selected_experts_and_weights_are_those_of_transformers(routed, family, dtype):
    result = routed[family][dtype]
    assert torch.equal(result["ours"] > 0, result["theirs"] > 0)
    assert len(torch.unique(result["theirs"] > 0, dim=0)) > 6  # tokens differ in their experts
    tolerance = 1e-6 if dtype == "fp32" or family == "glm4v_moe" else 4e-3
    torch.testing.assert_close(result["ours"], result["theirs"], atol=tolerance, rtol=0)


def gemma4_routes(path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By layer, ours and Transformers' weights (tokens, experts) in bf16."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from megatron_vlm.models.families import describe
    from megatron_vlm.models.layers.moe import FREE_ROUTE
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.parallel import setup

    setup.reset_layout(ParallelConfig(), seed=1)
    run = RunConfig()
    run.model.dtype = "bf16"
    model = build_model(run, describe(AutoConfig.from_pretrained(path)), setup.device())[0]
    hf_model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    found = []
    for ours, theirs in zip(
        (layer.mlp.router for layer in model.language_model.decoder.layers),
        (layer.router for layer in hf_model.model.language_model.layers),
        strict=True,
    ):
        with torch.no_grad():
            theirs.proj.weight.copy_(torch.randn_like(theirs.proj.weight) / 4)
            theirs.scale.copy_(torch.rand_like(theirs.scale) + 0.5)
            theirs.per_expert_scale.copy_(torch.rand_like(theirs.per_expert_scale) + 0.5)
            ours.weight.copy_(theirs.proj.weight)
            ours.scale.copy_(theirs.scale)
            ours.per_expert_scale.copy_(theirs.per_expert_scale)
            tokens = torch.randn(50, 1, theirs.hidden_size, dtype=torch.bfloat16)
            weights, experts = ours(tokens, torch.full((50, 1, 1, 1), FREE_ROUTE))
            _, chosen_weights, chosen = theirs(tokens[:, 0])
        trained, _ = ours(tokens, torch.full((50, 1, 1, 1), FREE_ROUTE))
        assert torch.equal(trained, weights)
        both = ((experts, weights), (chosen, chosen_weights))
        none = torch.zeros(50, ours.config.num_moe_experts)
        found.append([none.to(values.dtype).scatter(1, places, values) for places, values in both])
    return found


def test_routing_weights_of_gemma4_are_those_of_transformers_in_fp32(routed):
    assert len(routed["gemma4"]) > 1
    for ours, theirs in routed["gemma4"]:
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)  # in bf16 they would differ by 8e-3


# ---- balance ----------------------------------------------------------------------------------------------


def balance(layout: ParallelConfig, cells: dict[str, tuple[str, str, dict]]) -> dict[str, dict]:
    """name of (checkpoint, file of a case, settings of the model) -> the worst differences."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(layout, seed=1)
    return {
        name: parity.compare(layout, path, saved_cases.read(case), **model)
        for name, (path, case, model) in cells.items()
    }


def cell(folder: Path, row: str, **text) -> tuple[str, str, dict]:
    path = build_tiny_checkpoint("qwen3_vl_moe", folder / "model", text=BALANCED | text)
    torch.save(parity.case_for(path, parity.INPUTS[row]), folder / "case.pt")
    return str(path), str(folder / "case.pt"), {}


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> dict[str, tuple[str, str, dict]]:
    folder = tmp_path_factory.mktemp("balance")
    found = {row: cell(folder / row, row) for row in ("one image", "0, 1 and 3 images")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_vl_moe, "load_balancing_loss_func", mean_of_layers)
        found["two layers"] = cell(folder / "two", "0, 1 and 3 images", mlp_only_layers=[0, 3])
    return found


def mean_of_layers(
    logits: tuple, *others: Any, whole: Callable = modeling_qwen3_vl_moe.load_balancing_loss_func
) -> torch.Tensor:
    """Transformers takes all layers as one, as if expert 3 of one layer were expert 3 of the next."""
    assert len(logits) == 2
    return torch.stack([whole((layer,), *others) for layer in logits]).mean()


@pytest.fixture(scope="module")
def balanced(cells) -> dict[str, dict]:
    return run_distributed(1, balance, ParallelConfig(), cells)[0]


@pytest.mark.parametrize("row", ["one image", "0, 1 and 3 images"])
def test_balance_has_the_gradient_of_transformers_with_padding_left_out(balanced, row):
    assert balanced[row]["max_rel_grad"] <= parity.MAX_REL_GRAD, balanced[row]


@pytest.mark.long
def test_balance_is_taken_over_the_whole_sequence(cells):
    one = {"one image": cells["one image"]}
    for found in run_distributed(2, balance, ParallelConfig(tp=2), one):
        assert found["one image"]["max_rel_grad"] <= parity.MAX_REL_GRAD, found


def test_balance_of_several_layers_is_the_mean_of_each_layers(balanced):
    assert balanced["two layers"]["max_rel_grad"] <= parity.MAX_REL_GRAD, balanced["two layers"]


# ---- checkpoints ------------------------------------------------------------------------------------------


def train_on(path: str, run_dir: str, cases: str) -> dict[str, list]:
    """Losses of steps 3 and 4 at EP2, and after a checkpoint of step 2 in other layouts."""
    from megatron_vlm.models.weights.exporting import hf_tensors
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import checkpoint, step
    from megatron_vlm.training.optimizer import build_optimizer

    setup.init_distributed(ParallelConfig(ep=2), seed=1)
    case = saved_cases.read(cases)

    def start(layout: ParallelConfig):
        setup.reset_layout(layout, seed=1)
        run = RunConfig(parallel=layout)
        run.model.dtype, run.optimizer.lr = "fp32", 1e-3
        description, chunks = parity.load_chunks(path, run)
        ddp = step.data_parallel(chunks, run)
        return description, (ddp, *build_optimizer(ddp, run))

    def losses(state, layout: ParallelConfig) -> list[float]:
        rows = [batch for batch, _ in parity.my_micro_batches(case, layout)]
        return [step.train_step(*state, rows)[::2] for _ in range(2)]

    found = {}
    _, state = start(ParallelConfig(ep=2))
    losses(state, ParallelConfig(ep=2))
    checkpoint.save(run_dir, 2, *state)
    found["EP2"] = losses(state, ParallelConfig(ep=2))
    for name, layout in (("TP2", ParallelConfig(tp=2)), ("EP2·TP2", ParallelConfig(tp=2, ep=2))):
        description, state = start(layout)
        checkpoint.load_latest(run_dir, *state)
        found[name] = losses(state, layout)
    biases = [
        (name, tensor)
        for name, tensor in hf_tensors([state[0][0].module], description.rules)
        if name.endswith("e_score_correction_bias")
    ]
    return found | {"biases": dict(biases)}


@pytest.fixture(scope="module")
def resumed(checkpoints, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("resumed")
    torch.save(parity.case_for(checkpoints["glm4v_moe"], ["t", "it"]), folder / "case.pt")
    arguments = (checkpoints["glm4v_moe"], str(folder / "run"), str(folder / "case.pt"))
    return run_distributed(2, train_on, *arguments)[0]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["TP2", "EP2·TP2"])
def test_a_checkpoint_of_ep2_resumes_in(resumed, layout):
    """Losses and gradient norms."""
    assert resumed["EP2"][0] != resumed["EP2"][1]
    for mine, expected in zip(resumed[layout], resumed["EP2"], strict=True):
        assert mine == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
def test_training_leaves_the_selection_bias_alone(resumed, checkpoints):
    from safetensors.torch import load_file

    source = load_file(f"{checkpoints['glm4v_moe']}/model.safetensors")
    assert len(resumed["biases"]) == 3
    for name, bias in resumed["biases"].items():
        assert torch.equal(bias, source[name])
