"""What the package's models of time and memory say of the part `step`, computed on shapes.

A rehearsal is not for a process that sees a card, so this part is one that sees none (`runner.run_here`).
Times are of an H100, or scaled by the peak of the card.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from gpu_check.rows import Row, read
from gpu_check.sizes import CARD, ON_CUDA, About, Sizes, described, documents_of
from gpu_check.stack import MODEL, PUBLISHED, Case, cases
from megatron_vlm.extras.plan import search
from megatron_vlm.extras.plan.plan import RESERVE, KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.rehearsal import rehearse
from megatron_vlm.models.costs import pairs_seen
from megatron_vlm.training.figures import peak_flops

RESERVED = RESERVE / 2**30  # GiB
DECODING = search.LAUNCH / 3  # seconds of a layer: the host starts the operations of a forward pass alone


def card_share() -> float:
    """Return the card's peak over the peak that the model of time has; 1 if it is not known."""
    name = torch.cuda.get_device_name() if ON_CUDA else os.environ.get(CARD, "")
    return (peak_flops(name) or search.PEAK) / search.PEAK


def rate(model_rate: float) -> float:
    """Return operations a second on this card, where the model of time has `model_rate`."""
    return model_rate * card_share()


def read_expected(folder: Path) -> dict[str, float]:
    """Return what this part wrote, by the names of the rows of other parts."""
    return {row.what: row.value for row in read(folder) if row.part == "expected"}


def rows(sizes: Sizes, about: About) -> Iterator[Row]:
    for case in cases(sizes):
        for what, value in expected_of(case, sizes):
            yield Row("expected", f"{case.name}, {what}", value)
    yield Row("expected", "decoding, one layer, milliseconds a token", 1000 * DECODING)


def expected_of(case: Case, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Names of rows of `depths`, and what they should be about."""
    config = case.config("bf16")
    few, many = sizes.depths
    known_costs: dict[int, KnownCosts] = {layers: KnownCosts() for layers in sizes.depths}
    plans = {
        layers: make_plan(config, described(MODEL, sizes.with_layers(layers)), 1, known_costs[layers])
        for layers in sizes.depths
    }
    measured = case.depths[-1]
    stage = plans[measured].stages[0]
    yield "peak GiB by the plan", (stage.memory - RESERVE) / 2**30
    yield "peak GiB", rehearse(config, plans[measured].description, 1).peak / 2**30
    if config.optimizer.offload:
        yield "optimizer, milliseconds", 1000 * stage.offloaded / search.HOST
        return
    less, more = (seconds_of_documents(plans[layers], documents_of(case.tokens)) for layers in sizes.depths)
    layer = (more - less) / (many - few)
    yield "one layer, milliseconds", 1000 * layer
    yield "micro batch without layers, milliseconds", 1000 * (more - many * layer)
    whole = f"all {PUBLISHED} layers by these, micro batch, milliseconds"
    yield whole, 1000 * (more + (PUBLISHED - many) * layer)


def seconds_of_documents(plan: MemoryPlan, lengths: list[int]) -> float:
    """Return the modelled seconds of a row of documents; a plan is of one document in each row."""
    stage = plan.stages[0]
    share = sum(pairs_seen(length, None) for length in lengths) / pairs_seen(sum(lengths), None)
    saved = (1 - share) * stage.attention_flops
    packed = replace(stage, flops=stage.flops - saved, attention_flops=share * stage.attention_flops)
    return search.estimated_seconds(replace(plan, stages=(packed,))) / card_share()
