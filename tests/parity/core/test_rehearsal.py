"""A rehearsed step is the real one: its memory and its exchanges."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace

import pytest
import torch
from places import ROOT
from rehearsals import config_of, run_of

from megatron_vlm.cli import app
from megatron_vlm.cli import run as run_command
from megatron_vlm.config import ParallelConfig, RunConfig
from megatron_vlm.models.families import load
from megatron_vlm.recipes.published import CONFIGS
from tiny.checkpoints import TINY_FAMILIES
from tiny.distributed import run_distributed

WORST_MEMORY = 0.01  # between the rehearsed and the measured peak
WORST_PLAN = 0.1  # between the planned and the rehearsed
LAYOUTS = {
    "dp 2": ParallelConfig(),
    "tp 2": ParallelConfig(tp=2),
    "pp 2": ParallelConfig(pp=2, distributed_optimizer=False),
    "cp 2": ParallelConfig(cp=2),
    "tp 2, norms and gates again": ParallelConfig(tp=2),
    "dp 2, a layer again": ParallelConfig(),
}
AGAIN = {
    "tp 2, norms and gates again": {"recompute": "selective"},
    "dp 2, a layer again": {"recompute": "full", "recompute_layers": 1},
}
# without experts: in fp32 torch computes theirs one by one and reads how many tokens each has
DENSE = [name for name in TINY_FAMILIES if not load(name).has_experts]
OBJECTIVES = ("tokens", "dpo")
# A family is in every second layout, the next family in the others; in one of them with preferences.
# `make test-soak` has all layouts with both objectives.
PAIRS = {
    family: [
        (layout, OBJECTIVES[(place - number) % len(LAYOUTS) == 0])
        for place, layout in enumerate(LAYOUTS)
        if (place - number) % 2 == 0
    ]
    for number, family in enumerate(DENSE)
}
ALL = [(layout, objective) for layout in LAYOUTS for objective in OBJECTIVES]
FAMILIES = [pytest.param(("gemma3", PAIRS["gemma3"]), id="gemma3", marks=pytest.mark.long)]
FAMILIES += [pytest.param((family, ALL), id=f"{family} all", marks=pytest.mark.soak) for family in DENSE]


def run_named(layout: str, objective: str) -> RunConfig:
    """Two micro batches: as many as stages hold at once."""
    run = run_of(LAYOUTS[layout])
    run.model = replace(run.model, **AGAIN.get(layout, {}))
    run.train.objective = objective
    run.train.global_batch_size = 8 if layout.startswith("dp 2") else 4
    return run


def both(family: str, cells: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[dict, dict]]:
    """Of every layout and objective what is measured in a real step of this rank, and what its rehearsal
    says. The real step does as on a GPU what a CPU need not do: it copies pixels from the host, and linears
    add the gradients of their weights."""
    from megatron_vlm.models import vlm
    from megatron_vlm.parallel import linears, setup

    hf_config, measured, rank = config_of(family), {}, int(os.environ["RANK"])
    copied, vlm.on_device = vlm.on_device, lambda numbers, device: torch.as_tensor(numbers).clone()
    linears.DEVICES.append("cpu")
    setup.init_distributed(LAYOUTS["dp 2"], seed=1)
    for cell in cells:
        setup.reset_layout(LAYOUTS[cell[0]], seed=1)
        measured[cell] = real_step(run_named(*cell), hf_config)
    setup.shutdown()
    vlm.on_device = copied
    linears.DEVICES.remove("cpu")
    return {cell: (measured[cell], rehearsed(run_named(*cell), hf_config, rank)) for cell in cells}


def real_step(run: RunConfig, hf_config) -> dict:
    from megatron_vlm.config import derived
    from megatron_vlm.extras.plan.recorder import TensorMemory
    from megatron_vlm.extras.plan.rehearsal import example_batch
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import build_optimizer
    from megatron_vlm.training.step import data_parallel, train_step

    description, device = describe(hf_config), setup.device()
    with TensorMemory() as memory:
        batches = [example_batch(run, description)] * derived(run, 2)["micro_batches_per_step"]
        of_host = memory.alive
        model = data_parallel(build_model(run, description, device), run)
        optimizer, scheduler = build_optimizer(model, run)
        optimizer.step()
        step_loss = objective_of(run).step_loss(run, model)
        parts = [part for chunk in model for part in chunk.modules()]
        blank = [part._blank_image.as_model_kwargs() for part in parts if hasattr(part, "_blank_image")]
        of_host += sum(tensor.nbytes for each in blank for tensor in each.values())
        gc.collect()  # what building left behind in cycles
        held, peaks = memory.alive, []
        for _ in range(6):  # threads of gloo may keep what they were given for a while
            memory.peak = memory.alive
            train_step(model, optimizer, scheduler, batches, step_loss=step_loss)
            peaks.append(memory.peak)
    return {"peak": min(peaks) - of_host, "held": held - of_host}


def rehearsed(run: RunConfig, hf_config, rank: int) -> dict:
    from megatron_vlm.extras.plan.rehearsal import rehearse
    from megatron_vlm.models.families import describe

    run.model.load_weights = True  # pairs need it
    one = rehearse(run, describe(hf_config), 2, rank)
    return {
        "peak": one.peak,
        "held": one.weights + one.gradients + one.optimizer,
        "collectives": one.exchanged(),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def ranks(request) -> list[dict[tuple[str, str], tuple[dict, dict]]]:
    """By rank: layout and objective -> what was measured, and rehearsed."""
    family, cells = request.param
    ranks = run_distributed(2, both, family, cells)
    assert [list(rank) for rank in ranks] == [cells] * 2
    return ranks


def test_rehearsed_memory_is_the_measured_one(ranks):
    for rank in ranks:
        for cell, (real, ours) in rank.items():
            assert ours["held"] == pytest.approx(real["held"], rel=WORST_MEMORY), cell
            assert ours["peak"] == pytest.approx(real["peak"], rel=WORST_MEMORY), cell


def test_what_adam_keeps_and_short_gradients_are_counted_where_they_are():
    from megatron_vlm.extras.plan.plan import make_plan
    from megatron_vlm.extras.plan.rehearsal import rehearse
    from megatron_vlm.models.families import describe

    description, found = describe(config_of("gemma3")), {}
    for offload, in_fp32 in ((False, True), (True, True), (False, False)):
        run = run_of(ParallelConfig())
        run.model.dtype, run.optimizer.offload, run.optimizer.reduce_in_fp32 = "bf16", offload, in_fp32
        one, [stage] = rehearse(run, description, 2), make_plan(run, description, 2).stages
        assert stage.gradients == pytest.approx(one.gradients, rel=WORST_MEMORY)
        assert stage.offloaded == pytest.approx(one.offloaded, rel=WORST_MEMORY)
        found[offload, in_fp32] = one
    plain, away, short = found.values()
    assert away.offloaded == pytest.approx(plain.optimizer - away.optimizer, rel=WORST_MEMORY)
    assert plain.peak - away.peak == pytest.approx(plain.optimizer - away.optimizer, rel=WORST_MEMORY)
    assert 2 * short.gradients == plain.gradients


def test_a_rehearsal_holds_what_attention_does_in_its_backward_pass():
    """One document of 4,096 tokens, whose 32 query heads share 8 of keys."""
    from megatron_vlm.extras.plan.recorder import META, Recorder
    from megatron_vlm.models.layers.attention import Attend
    from megatron_vlm.models.layers.attention_kernels import KERNELS, most_workspace
    from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement
    from megatron_vlm.parallel import setup

    tokens, held = 4096, []
    with setup.pretend_rank(ParallelConfig(), 1), Recorder() as recorder:
        view = AttentionPlan(Placement([tokens], [], 1), 0, tokens, [None], META).views[None]
        shapes = [(tokens, heads, 128) for heads in (32, 8, 8)]
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device=META).requires_grad_() for shape in shapes]
        context = Attend.apply(*inputs, view, KERNELS["flash"], 0.1)
        held.append(recorder.alive)
        torch.autograd.grad(context, inputs, context)
    gradients = sum(x.nbytes for x in inputs)
    workspace = most_workspace(*shapes[:2], 1, (tokens, tokens))
    assert workspace > 1.5 * gradients
    assert recorder.peak - held[0] == pytest.approx(gradients + workspace, rel=1e-3)


def test_a_plan_has_the_workspace_of_attention_where_it_is_the_most(monkeypatch):
    """Of one layer of the language model or of the tower, whichever is more."""
    from megatron_vlm.extras.plan import plan
    from megatron_vlm.models import costs
    from megatron_vlm.models.families import describe

    run = run_of(ParallelConfig())
    run.model.dtype, run.model.attention = "bf16", "auto"
    for module in (plan, costs):
        planned = {}
        for nbytes in (10**10, 2 * 10**10):
            monkeypatch.setattr(module, "most_workspace", lambda *_, nbytes=nbytes: nbytes)
            planned[nbytes] = plan.make_plan(run, describe(config_of("gemma3")), 2).memory
        first, second = planned.values()
        assert second - first >= 10**10, module
        monkeypatch.undo()


def test_tensor_parallel_ranks_exchange_what_sequence_parallelism_needs():
    """Hidden states are gathered twice a layer in forward and backward, and again for weights' gradients, and
    scattered twice in both; the embedding and the output layer add a few."""
    text = config_of("gemma3").text_config
    layers, width = text.num_hidden_layers, text.hidden_size
    calls = rehearsed(run_of(ParallelConfig(tp=2)), config_of("gemma3"), rank=1)["collectives"]
    gathers, gathered = calls["tp", "allgather_base"]
    scatters, scattered = calls["tp", "reduce_scatter_base"]
    assert (gathers, scatters) == (4 * (6 * layers + 3), 4 * (4 * layers + 2))
    assert scattered / scatters == 2 * 256 * width * 4  # tokens of two rows, in fp32


@pytest.mark.long
def test_tensor_parallel_ranks_exchange_r_numbers_a_token_and_linear_for_adapters():
    """All else is exchanged by training without adapters, too, and at most as often."""
    from megatron_vlm.extras.plan.rehearsal import rehearse
    from megatron_vlm.models.families import describe

    description, calls = describe(config_of("gemma3")), {}
    for r in (0, 4):
        run = run_of(ParallelConfig(tp=2))
        run.model.load_weights, run.adapter.r = True, r
        found = rehearse(run, description, 2).collectives
        calls[r] = {  # in all four micro batches; once in the step, gradients are added up
            (call.kind, call.nbytes): count
            for call, count in found.items()
            if call.group == "tp" and count >= 4
        }
    assert all(calls[4].get(call, 0) <= count for call, count in calls[0].items())
    more = {call: count for call, count in calls[4].items() if call not in calls[0]}
    linears = 7 * description.text.num_hidden_layers
    for kind in ("allgather_base", "reduce_scatter_base"):
        sent = sum(nbytes * count for (each, nbytes), count in more.items() if each == kind)
        assert sent == 4 * linears * 2 * 256 * 4 * 4, kind  # of four micro batches of two rows, in fp32
    assert {kind for kind, _ in more} == {"allgather_base", "reduce_scatter_base"}


def plans_and_rehearsals(recipe: str, path: str) -> list[tuple[float, int]]:
    """Of a step that keeps all, that makes norms and gates again, ten layers, and all layers."""
    from megatron_vlm.extras.plan.plan import RESERVE, make_plan
    from megatron_vlm.extras.plan.rehearsal import rehearse
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.hf import load_config
    from megatron_vlm.recipes import load_recipe

    description, found = describe(load_config(path)), []
    full = {"recompute": "full"}
    for again in ({}, {"recompute": "selective"}, full | {"recompute_layers": 10}, full):
        run = load_recipe(recipe)(train_data_path="none", **again)
        gpus = run.parallel.model_size
        planned = make_plan(run, description, gpus).memory - RESERVE
        found.append((planned, rehearse(run, description, gpus).peak))
    return found


@pytest.mark.long
def test_a_plan_has_the_memory_of_the_rehearsal():
    config = str(CONFIGS / "qwen3_vl_2b.json")
    [found] = run_distributed(1, plans_and_rehearsals, "qwen3_vl_2b", config)
    for planned, peak in found:
        assert planned == pytest.approx(peak, rel=WORST_PLAN)
    peaks = [peak for _, peak in found]
    assert peaks == sorted(peaks, reverse=True)


def rows_of_today(name: str, gpus: int) -> list[dict]:
    from rehearse_recipes import opened, rows_of, with_batch

    run, description = opened(name, name)
    return list(rows_of(name, with_batch(run, gpus), description, gpus))


@pytest.mark.soak
def test_the_report_is_of_this_state():
    """Else `tools/rehearse_recipes.py` writes it again. One row stands for all."""
    rows = json.loads((ROOT / "reports" / "rehearsal.json").read_text(encoding="utf-8"))
    [found] = run_distributed(1, rows_of_today, "internvl35_1b", 8)
    [then] = [row for row in rows if (row["recipe"], row["gpus"]) == ("internvl35_1b", 8)]
    [now] = found
    assert now.pop("collective_bytes") == then.pop("collective_bytes") and now.keys() == then.keys()
    for key, value in then.items():
        assert now[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3)), key


@pytest.mark.long
def test_the_command_rehearses_and_searches(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the command sets it
    config = json.loads((CONFIGS / "qwen3_vl_2b.json").read_text())
    config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"] = 4, 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = [f"hf_path={tmp_path}", "pp=2", "data.seq_length=1024", "--gpus", "4"]
    with pytest.raises(SystemExit) as ended:
        command = ["plan", "--recipe", "qwen3_vl_2b", "--rehearse", "--search", *settings]
        run_command(app, "megatron-vlm", command)
    assert ended.value.code in (None, 0)
    text = capsys.readouterr().out
    assert "Rank 0, of stage 0, rehearsed: " in text and "Rank 2, of stage 1, rehearsed: " in text
    assert "The quickest whose rehearsal fits, with " in text
