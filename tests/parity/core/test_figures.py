"""The figures of a step: its operations against a counter of what torch does, and what every rank adds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import parity
import pytest
import saved_cases
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.layers.attention_sizes import RECURRENT
from megatron_vlm.models.layers.moe import Router
from megatron_vlm.training.figures import BySource, StepFigures
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

FREEZE = {"nothing": [], "tower": ["tower"], "all but projector": ["tower", "language_model"]}
FREEZE |= {"tower and projector": ["tower", "projector"], "language model": ["language_model"]}

# ---- in the processes -------------------------------------------------------------------------------------


def operations(path: str, cases: str) -> dict[str, list[float]]:
    """By case, what StepWork counts of a batch, and what a step does, with attention as it must be."""
    from transformers import AutoConfig

    from megatron_vlm.models.costs import StepWork, delta_rule_flops
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.layers.delta_rule import DeltaRule
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.objectives import objective_of
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import step

    setup.init_distributed(ParallelConfig(), seed=1)
    hf_config = AutoConfig.from_pretrained(path)
    description, found = describe(hf_config), {}
    DeltaRule.apply = lambda query, key, value, *_: value  # counted apart
    for name, (freeze, recompute, batch) in saved_cases.read(cases).items():
        run = RunConfig(model=ModelConfig(dtype="fp32", freeze=freeze, recompute=recompute))
        chunks = build_model(run, description, setup.device())
        ddp, again = step.data_parallel(chunks, run), name == "pairs"
        run.train.objective = "dpo" if again else "tokens"
        step_loss = objective_of(run).step_loss(run, ddp)
        counter = FlopCounterMode(display=False, custom_mapping=GROUPED)
        with counter:
            step_loss(ddp, [batch])
        done = products(counter) + (3 + again) * seen_pairs(chunks[0], batch)
        if batch["visual_inputs"]:
            done += (1 + again + 2 * trained_share(chunks[0].vision)) * tower_attention(
                chunks[0].vision, batch
            )
        work = StepWork(run, description).of(batch)
        architecture = description.architecture
        rules = sum(delta_rule_flops(architecture, layer) for layer in range(architecture["num_layers"]))
        done += (3 + again) * work.tokens * rules
        if "language_model" in freeze:
            done -= 2 * work.tokens * router_weights(chunks[0])  # Megatron has no frozen router
        found[name] = [work.flops, done, work.tokens, work.places, work.images]
    return found


def grouped(shape_a, shape_b, *_, **__) -> int:
    """Rows of (rows, k) each by one of (experts, k, n), or (k, rows) by (rows, n) in as many groups."""
    return 2 * shape_a[0] * shape_a[1] * shape_b[-1]


GROUPED = {torch.ops.aten._grouped_mm: grouped}


def products(counter: FlopCounterMode) -> int:
    """All but attention."""
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


def seen_pairs(model: Any, batch: dict) -> float:
    """Operations of attention's forward pass over the pairs that the dense backend's mask allows."""
    from megatron_vlm.models.layers.attention import mask
    from megatron_vlm.models.layers.attention_sizes import heads_of

    config = model.config
    latent = config.latent_heads  # counted without the zeros that fill its heads up
    windows = config.layer_windows or (None,) * config.num_layers
    layout = model.layout(batch)
    plan = layout.stream(0, layout.longest, windows, torch.device("cpu")).plan
    return 2 * sum(
        (window != RECURRENT)
        and int(mask(plan, plan.views[window]).sum())
        * config.num_attention_heads
        * (latent.scores + latent.value if latent else 2 * heads_of(config, layer).channels)
        for layer, window in enumerate(windows)
    )


def router_weights(model: Any) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, Router))


def trained_share(vision: torch.nn.Module) -> float:
    """Of the tower's layers; LLaVA's features leave out the last, which has no backward pass."""
    layers = next((m for m in vision.modules() if isinstance(m, torch.nn.ModuleList)), ())
    if not layers:  # Gemma 4 12B's patches go straight into a linear
        return 0.0
    return sum(any(p.requires_grad for p in layer.parameters()) for layer in layers) / len(layers)


def tower_attention(vision: torch.nn.Module, batch: dict) -> int:
    """Operations of the forward pass of the tower's attention, item by item."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for item in batch["visual_inputs"].items():
            vision(**item.as_model_kwargs())
    return counter.get_total_flops() - products(counter)


def figures_of_a_step(path: str, cases: str) -> dict[str, dict[str, float]]:
    """By layout, the figures of a step of 2 seconds."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.training import evaluate, step
    from megatron_vlm.training.losses import token_losses
    from megatron_vlm.training.optimizer import build_optimizer

    setup.init_distributed(ParallelConfig(), seed=1)
    found = {}
    rows = saved_cases.read(cases)
    for name, (layout, recompute) in LAYOUTS.items():
        setup.reset_layout(layout, seed=1)
        run = RunConfig(parallel=layout, model=ModelConfig(dtype="fp32", recompute=recompute))
        description, chunks = parity.load_chunks(path, run)
        ddp = step.data_parallel(chunks, run)
        figures = StepFigures(run, description, ddp, SOURCES)
        mine = [batch for batch, _ in parity.my_micro_batches({"rows": rows}, layout)]
        left = iter(mine)
        take = lambda count, left=left: list(islice(left, count))  # noqa: E731
        _, valid = evaluate.validation_loss(run, ddp, token_losses, take, SOURCES)  # not counted in the step
        step.train_step(ddp, *build_optimizer(ddp, run), mine, figures)
        found[name] = figures.of_step(seconds=2.0, data_seconds=0.5)
        found[name] |= {f"valid_{figure}": number for figure, number in valid.items()}
    return found


LAYOUTS = {
    "DP2": (ParallelConfig(), "none"),
    "EP2": (ParallelConfig(ep=2), "none"),
    "EP2·TP2+SP, recomputed": (ParallelConfig(ep=2, tp=2), "full"),
    "CP2": (ParallelConfig(cp=2), "none"),
    "PP2": (ParallelConfig(pp=2), "none"),
    "PP2·VPP2": (ParallelConfig(pp=2, vpp=2), "none"),
}
SOURCES = ["a", "a-b", "nothing of it", "c.jsonl"]
KEYS = ["a-1", "a-b-000000001", "a-2", "c.jsonl-000000003"]

# ---- the tests --------------------------------------------------------------------------------------------


def encoded(path: Path, rows: list[str]) -> dict:
    from transformers import AutoConfig, AutoProcessor

    from megatron_vlm.models.families import describe

    hf_config = AutoConfig.from_pretrained(path)
    _, padded, single = parity.encode(AutoProcessor.from_pretrained(path), describe(hf_config), rows)
    return {"padded": padded, "packed": parity.pack(single)}


def cells() -> list:
    """Every family, and what is frozen: all of Gemma3 and two in turn of others in
    `make test-long`, and all in `make test-soak`."""
    frozen = [name for name in FREEZE if name != "nothing"]
    found = [pytest.param("gemma3", [*FREEZE], marks=pytest.mark.long)]
    for number, family in enumerate(TINY_FAMILIES):
        if family != "gemma3":
            two = [frozen[(number + place) % len(frozen)] for place in (0, 1)]
            if family in parity.IN_LONG:
                found.append(pytest.param(family, ["nothing", *two], marks=pytest.mark.long, id=family))
            found.append(pytest.param(family, [*FREEZE], marks=pytest.mark.soak, id=f"{family} all"))
    return found


@pytest.mark.parametrize(("family", "frozen"), cells())
def test_operations_are_those_that_torch_counts(family, frozen, tmp_path):
    path = build_tiny_checkpoint(family, tmp_path / "model")
    # Pixtral's first convolution also takes the padding of images of different sizes
    rows = ["t", "it"] if family in ("mistral3", "lighton_ocr") else ["t", "it", "ititit"]
    batches = encoded(path, rows)
    cases = {rows: ([], "none", batch) for rows, batch in batches.items()}
    cases |= {name: (FREEZE[name], "none", batches["packed"]) for name in frozen}
    cases["pairs"] = [], "none", encoded(path, ["it", "t"])["packed"]
    if "video" in parity.inputs_of(family):
        cases["video"] = ([], "none", encoded(path, ["vt", "it"])["packed"])
    torch.save(cases, tmp_path / "cases.pt")
    found = run_distributed(1, operations, str(path), str(tmp_path / "cases.pt"))[0]
    assert len({done for _, done, *_ in found.values()}) >= min(5, len(frozen) + 1)
    assert {name: counted for name, (counted, *_) in found.items()} == {
        name: done for name, (_, done, *_) in found.items()
    }
    tokens = int((batches["padded"]["attention_mask"] > 0).sum())
    assert found["padded"][2:] == [
        tokens,
        batches["padded"]["input_ids"].numel(),
        len(batches["padded"]["visual_inputs"].items()),
    ]
    assert found["packed"][2] == tokens


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The figures of a step in every layout, and those that they must be."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from megatron_vlm.models.costs import StepWork
    from megatron_vlm.models.families import describe

    folder = tmp_path_factory.mktemp("figures")
    path = build_tiny_checkpoint("qwen3_vl_moe", folder / "model")
    hf_config = AutoConfig.from_pretrained(path)
    description = describe(hf_config)
    hf, _, rows = parity.encode(AutoProcessor.from_pretrained(path), description, ["t", "it", "t", "ititit"])
    for row, key, weight in zip(rows, KEYS, [1.0, 0.5, 3.0, 1.0], strict=True):
        row["__key__"] = [[key]]
        row["loss_mask"] *= weight
    torch.save(rows, folder / "rows.pt")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    output = model(**hf, output_router_logits=True, use_cache=False)
    logits = output.router_logits
    real = hf["attention_mask"].bool().flatten()
    chosen = [layer[real].topk(hf_config.text_config.num_experts_per_tok).indices for layer in logits]
    tokens = torch.stack(
        [layer.flatten().bincount(minlength=hf_config.text_config.num_experts) for layer in chosen]
    )
    balance = tokens.amax(1) / tokens.double().mean(1)
    work = StepWork(RunConfig(), description)
    expected = {
        "tflops_per_device": sum(work.of(row).flops for row in rows) / 4e12,
        "tokens_per_second": real.sum().item() / 2,
        "tokens_per_second_per_device": real.sum().item() / 4,
        "images_per_second_per_device": 4 / 4,
        "padding": 1 - real.sum().item() / sum(row["input_ids"].numel() for row in rows),
        "data_seconds": 0.5,
        "expert_balance": balance.mean().item(),
        "expert_balance_worst": balance.max().item(),
    }
    for name, its_rows in {"a": [0, 2], "a-b": [1], "c.jsonl": [3]}.items():
        labels = torch.cat([rows[row]["labels"] for row in its_rows])
        weights = torch.cat([rows[row]["loss_mask"] for row in its_rows]).flatten()
        losses = torch.nn.functional.cross_entropy(
            output.logits[its_rows].flatten(0, 1), labels.flatten(), reduction="none"
        )
        expected[f"loss/{name}"] = ((losses * weights).sum() / weights.sum()).item()
        expected[f"trained_tokens/{name}"] = int((weights > 0).sum())
        expected[f"samples/{name}"] = len(its_rows)
        expected |= {f"valid_{figure}": of for figure, of in expected.items() if figure.endswith(f"/{name}")}
    ranks = run_distributed(2, figures_of_a_step, str(path), str(folder / "rows.pt"))
    assert ranks[0] == ranks[1]
    return ranks[0], expected


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_the_same_in_every_layout(steps, layout):
    found, expected = steps
    gigabytes = found[layout].pop("peak_memory_gb")
    losses = {name: number for name, number in expected.items() if "loss/" in name}
    assert {name: found[layout].pop(name) for name in losses} == pytest.approx(
        losses, abs=parity.MAX_ABS_LOSS
    )
    rest = {name: number for name, number in expected.items() if name not in losses}
    assert found[layout] == pytest.approx(rest, rel=1e-12)
    assert 1.2 < expected["expert_balance"] < expected["expert_balance_worst"] and 0.2 < gigabytes < 20


def test_the_tokens_of_packed_documents_are_of_their_sources():
    labels = torch.full((2, 6), IGNORE_INDEX)
    labels[0, [0, 3, 4]] = labels[1, 2] = 7
    documents = torch.tensor([[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 0, 0]], dtype=torch.int32)
    batch = {"labels": labels, "attention_mask": documents, "loss_mask": (labels == 7) * 0.5}
    batch["__key__"] = [["b-1", "a-1", "a-b-2"], ["b-2", "b-3"]]
    samples, tokens, weights = BySource(["a", "b", "a-b"]).sources_of(batch)
    assert samples.tolist() == [1, 0, 2, 1, 1] and tokens.tolist() == [1, 0, 2, 1]
    assert weights.tolist() == [0.5] * 4
