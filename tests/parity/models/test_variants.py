"""Text models and towers that a family can hold besides those of its plain tiny checkpoint: equal to
Transformers and peft in the layouts that cut a model differently, and bit for bit after import and export."""

from __future__ import annotations

import functools
from pathlib import Path

import adapter_parity
import parity
import pytest
import torch
from weight_trips import check_equal, round_trips

from megatron_vlm.models.families import load
from megatron_vlm.models.family_parts.limits import model_types
from megatron_vlm.supported import SUPPORTED
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

VARIANTS = [(family, name) for family, parts in TINY_FAMILIES.items() for name in parts.variants]
LAYOUTS = ["TP2+SP", "PP2", "DP2 dist. optimizer", "CP2"]
ADAPTED = ["TP2+SP, adapter", "PP2, adapter"]
INPUTS = {name: parity.INPUTS[name] for name in ("text", "0, 1 and 3 images")}
PACKED = {name: parity.PACKED[name] for name in ("packed: short documents", "packed: images in one document")}
OF_EXPERTS = dict.fromkeys(  # besides
    (("gemma4", "six experts"), ("mistral3", "mistral4")), (["EP2"], ["EP2, adapter"])
)
OTHER_NAMES = {"kimi_k2"}  # Kimi_K25Config takes it for deepseek_v3
SHARING = {("gemma4", "small")}  # no layout divides its layers; recomputation must not lose what they share
NOT_PIPED = (
    ["TP2+SP", "CP2"],
    ["TP2+SP, adapter", "TP2+SP, adapter, recomputed", "TP2+SP, adapter with DoRA", "CP2, adapter with DoRA"],
)
CUT = ("TP2", "PP2")  # layouts of test_weights
pytestmark = pytest.mark.soak


def layouts_of(family: str, variant: str) -> tuple[list[str], list[str]]:
    """Layouts of the whole model, and of adapters."""
    if (family, variant) in SHARING:
        return NOT_PIPED
    further, adapted = OF_EXPERTS.get((family, variant), ([], []))
    return LAYOUTS + further, ADAPTED + adapted


def cut_of(family: str, variant: str) -> tuple[str, ...]:
    return ("TP2",) if (family, variant) in SHARING else CUT


@pytest.fixture(scope="module")
def of_variants(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """(family, variant) -> its checkpoint, its exports, and its measurements in every layout."""
    folder, jobs, trips = tmp_path_factory.mktemp("variants"), [], []
    for number, (family, name) in enumerate(VARIANTS):
        work = folder / str(number)
        path = build_tiny_checkpoint(family, work / "start", **TINY_FAMILIES[family].variants[name])
        reference = parity.Reference(path)
        cases = {name: reference.case(rows) for name, rows in INPUTS.items()}
        cases |= {name: parity.packed(reference.case(rows)) for name, rows in PACKED.items()}
        torch.save(cases, work / "cases.pt")
        layouts, adapted = layouts_of(family, name)
        adapters = {adapter_parity.LAYOUTS[layout][3] for layout in adapted}
        torch.save(adapter_parity.cases(family, path, sorted(adapters)), work / "adapter.pt")
        names = [*INPUTS, *PACKED]
        wanted = [dict.fromkeys(some, names) for some in (layouts, adapted)]
        jobs.append((str(path), str(work / "cases.pt"), str(work / "adapter.pt"), *wanted))
        trips += [(layout, str(path), str(work / layout)) for layout in cut_of(family, name)]
    measured = run_distributed(2, measure, jobs, trips, timeout=1200)[0]
    return {
        variant: {"folder": folder / str(number), "rows": rows}
        for number, (variant, rows) in enumerate(zip(VARIANTS, measured, strict=True))
    }


def measure(jobs: list[tuple], trips: list[tuple[str, str, str]]) -> list[list[dict]]:
    found = []
    for path, cases, adapter_cases, layouts, adapted in jobs:
        rows = parity.measure(layouts, path, cases)
        found.append(rows + adapter_parity.measure(adapted, path, adapter_cases))
    round_trips(trips)
    return found


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_equals_transformers_and_peft(of_variants, family, variant):
    rows = of_variants[family, variant]["rows"]
    assert {row["layout"] for row in rows} == {*sum(layouts_of(family, variant), [])}
    for row in rows:
        assert row["passed"], row


@pytest.mark.parametrize(
    ("family", "variant", "layout"), [(*each, layout) for each in VARIANTS for layout in cut_of(*each)]
)
def test_round_trip_is_bit_equal(of_variants, family, variant, layout):
    folder: Path = of_variants[family, variant]["folder"]
    check_equal(folder / layout, folder / "start")


@functools.cache
def types(family: str, variant: str) -> tuple[str, str]:
    """The HF model types of the text model and of the tower; "" is the plain checkpoint."""
    parts = TINY_FAMILIES[family]
    given = parts.variants[variant] if variant else {}
    sizes = {key: value for key, value in given.items() if key not in ("text", "vision")}
    processor = parts.processor(["a"], parts.template, **sizes)
    config = parts.config(processor, given.get("text", {}), given.get("vision", {}))
    return config.text_config.model_type, config.vision_config.model_type


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_text_model_and_tower_is_in_some_checkpoint(family):
    """A guard: what a family says that it takes is what the tests above see."""
    seen = [types(family, variant) for variant in ("", *TINY_FAMILIES[family].variants)]
    known = model_types(load(family))
    assert {*known["text_config"]} - OTHER_NAMES == {text for text, _ in seen}
    assert load(family).tower_types == () or {*load(family).tower_types} == {tower for _, tower in seen}
