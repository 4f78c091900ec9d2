"""One loss however the batch is cut, documents that do not see each other, recomputation, freezing."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import parity
import pytest
import saved_cases
import torch

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.families import load
from megatron_vlm.training import step
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- in the processes -------------------------------------------------------------------------------------


def on_two_ranks(path: str, cases: str) -> dict:
    """Two data-parallel ranks: rank 0 has the rows without and with 3 images, rank 1 the row with 1."""
    from megatron_vlm.parallel import setup

    layout = ParallelConfig(distributed_optimizer=False)
    setup.init_distributed(layout, seed=1)
    case = saved_cases.read(cases)
    return {
        "per token": parity.compare(layout, path, case),
        "mean of means": parity.compare(layout, path, case, per_token_loss=False),
    }


def third_step(path: str, cases: str) -> dict[str, torch.Tensor]:
    """The gradients of the third step over all rows, as many micro batches as rows."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.optimizer import build_optimizer

    run = RunConfig(parallel=ParallelConfig(distributed_optimizer=False))
    run.model.dtype, run.optimizer.lr = "fp32", 1e-3
    setup.init_distributed(run.parallel, seed=1)
    _, chunks = parity.load_chunks(path, run)
    chunks[0].requires_grad_(True)  # also of layers that no feature depends on
    ddp = step.data_parallel(chunks, run)
    rank, ranks = setup.data_parallel_place()
    rows = saved_cases.read(cases)["rows"][rank::ranks]
    optimizer, scheduler = build_optimizer(ddp, run)
    for _ in range(3):
        step.train_step(ddp, optimizer, scheduler, rows)
    return {name: param.main_grad.clone() for name, param in ddp[0].module.named_parameters()}


def in_one_process(path: str, cases: str) -> dict:
    from megatron_vlm.parallel import setup
    from megatron_vlm.training.step import data_parallel

    setup.init_distributed(ParallelConfig(), seed=1)
    case = saved_cases.read(cases)

    def model(**settings):
        run = RunConfig(model=ModelConfig(dtype="fp32", **settings))
        return data_parallel(parity.load_chunks(path, run)[1], run)

    rows, whole = case["rows"], model()
    return {
        "doubled": gradients(whole, [row | {"loss_mask": 2 * row["loss_mask"]} for row in rows]),
        "recompute full": parity.compare(ParallelConfig(), path, case, recompute="full"),
        "recompute selective": parity.compare(ParallelConfig(), path, case, recompute="selective"),
        "unpacked": gradients(whole, rows),
        "packed": gradients(whole, [parity.pack(rows)]),
        "leak": leak(whole, rows),
        "frozen": trainable(model(freeze=["tower", "language_model"])[0]),
    }


def gradients(ddp: list, micro_batches: list[dict]) -> dict:

    for chunk in ddp:
        chunk.zero_grad_buffer()
    loss, tokens = step.mean_loss(parity.backward(ddp, micro_batches))
    params = dict(ddp[0].module.named_parameters())
    grads = {name: param.main_grad.clone() for name, param in params.items() if param.requires_grad}
    return {"loss": loss, "tokens": tokens, "grads": grads, "names": list(params)}


def leak(chunks: list, rows: list[dict]) -> dict:
    """Largest change of the logits of document 1 and of document 2 when a token of document 1 changes."""
    from megatron_vlm.training.evaluate import logits_of

    packed = parity.pack(rows[:2])
    changed = packed["input_ids"].clone()
    changed[0, 5] += 1
    before, after = (
        logits_of(chunks, [packed | {"input_ids": ids}]) for ids in (packed["input_ids"], changed)
    )
    change_S = (before[0] - after[0]).abs().amax(-1)
    document_S = packed["attention_mask"][0]
    return {document: change_S[document_S == document].max().item() for document in (1, 2)}


def trainable(ddp) -> list[str]:
    return [name for name, param in ddp.module.named_parameters() if param.requires_grad]


# ---- the tests --------------------------------------------------------------------------------------------


@functools.cache
def _measured(kind: str, path: Path, cases: Path) -> dict:
    fn, processes = {"two": (on_two_ranks, 2), "one": (in_one_process, 1)}[kind]
    return run_distributed(processes, fn, str(path), str(cases))[0]


@pytest.fixture(scope="module", params=parity.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def measured(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    path, cases = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "case.pt"
    torch.save(parity.case_for(path, ["t", "it", "ititit"]), cases)
    return lambda kind: _measured(kind, path, cases)


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_rows_of_unequal_tokens_give_the_single_process_gradient(measured):
    result = measured("two")["per token"]
    assert result["passed"], result


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_a_mean_of_micro_batch_means_does_not(measured):
    result = measured("two")["mean of means"]
    assert result["max_rel_grad"] > 100 * parity.MAX_REL_GRAD


@pytest.mark.long
def test_gradients_reduced_during_the_backward_pass_are_those_of_one_process(tmp_path):
    """From the second step on, in the last of several micro batches; with a layer that is never used."""
    path = build_tiny_checkpoint("mistral3", tmp_path / "checkpoint")
    config = json.loads((path / "config.json").read_text()) | {"vision_feature_layer": -2}
    (path / "config.json").write_text(json.dumps(config))
    torch.save(parity.case_for(str(path), ["t", "it", "ititit", "it"]), tmp_path / "case.pt")
    one, two = (run_distributed(n, third_step, str(path), str(tmp_path / "case.pt"))[0] for n in (1, 2))
    unused = max(name for name in one if name.startswith("vision.vision_tower.transformer.layers."))
    assert not one[unused].any()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_only_the_ratio_of_weights_counts(measured):
    """Weights of 2 give to the bit what weights of 1 give, but for the number that they sum to."""
    doubled, plain = measured("one")["doubled"], measured("one")["unpacked"]
    assert (doubled["loss"], doubled["tokens"]) == (plain["loss"], plain["tokens"])
    assert all(torch.equal(doubled["grads"][name], grad) for name, grad in plain["grads"].items())


WEIGHTED_LAYOUTS = ["DP2", "TP2+SP", "PP2", "PP2·VPP2", "CP2"]


@pytest.mark.long
@pytest.mark.parametrize("tried", ["pairs", pytest.param("all", marks=pytest.mark.soak)])
def test_weighted_tokens_give_transformers_weighted_loss(family, tried, tmp_path):
    """Also where all weights of a step are less than one token's. A layout has one of the cases, the next
    family another one."""
    path = build_tiny_checkpoint(family, tmp_path / "checkpoint")
    weighted = parity.case_for(path, ["t", "it", "ititit"], weights=[0.3, 1.0, 2.5, 0.05])
    cases = {"rows": weighted, "packed": parity.packed(weighted)}
    cases["less than 1"] = parity.case_for(path, ["5", "it"], weights=[0.001, 0.002])
    assert 0 < cases["less than 1"]["batch"]["loss_mask"].sum() < 0.5
    torch.save(cases, tmp_path / "cases.pt")
    names, number = list(cases), list(TINY_FAMILIES).index(family)
    wanted = {
        layout: names if tried == "all" else [names[(number + place) % len(names)]]
        for place, layout in enumerate(WEIGHTED_LAYOUTS)
    }
    rows = run_distributed(2, parity.measure, wanted, str(path), str(tmp_path / "cases.pt"))[0]
    assert [(row["layout"], row["input"]) for row in rows] == [
        (layout, name) for layout, inputs in wanted.items() for name in inputs
    ]
    assert {row["input"] for row in rows} == {*cases}
    assert [row for row in rows if not row["passed"]] == []


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_nothing(measured, recompute):
    result = measured("one")[f"recompute {recompute}"]
    assert result["passed"], result


def test_packed_documents_have_the_loss_of_unpacked_ones(measured):
    packed, unpacked = measured("one")["packed"], measured("one")["unpacked"]
    assert packed["tokens"] == unpacked["tokens"] > 100
    assert packed["loss"] == pytest.approx(unpacked["loss"], abs=parity.MAX_ABS_LOSS)


def test_packed_documents_have_the_gradients_of_unpacked_ones(measured):
    packed, unpacked = measured("one")["packed"]["grads"], measured("one")["unpacked"]["grads"]
    scales = parity.gradient_scales(unpacked)
    for name, expected in unpacked.items():
        error = (packed[name] - expected).abs().max().item()
        assert error <= parity.MAX_REL_GRAD * scales(name), name


def test_a_document_does_not_see_the_one_before(measured):
    leak = measured("one")["leak"]
    assert leak[2] == 0 and leak[1] > 1e-3


def test_frozen_groups_have_no_gradient(measured, family):
    names = measured("one")["frozen"]
    assert names and all(name.startswith(load(family).groups["projector"]) for name in names)


def test_every_parameter_is_in_one_freeze_group(measured, family):
    prefixes = load(family).groups.values()
    for name in measured("one")["unpacked"]["names"]:
        assert sum(name.startswith(group) for group in prefixes) == 1, name


def test_the_norm_is_that_of_megatrons_fallback():
    from megatron.core.utils import local_multi_tensor_l2_norm

    gradients = [torch.linspace(-n, n + 1, n) for n in (12, 0, 1000)]
    (ours, _), (megatrons, _) = (
        norm(0, None, [gradients], False) for norm in (step._norm, local_multi_tensor_l2_norm)
    )
    assert torch.equal(ours, megatrons)
