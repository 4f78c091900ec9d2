"""Rehearse a step of every recipe of a real size, in its own layout on the fewest GPUs and on 8, 64 and 1,024
where it divides them, and in its layout for GPUs of 141 GB on 8: reports/rehearsal.json.

python tools/rehearse_recipes.py                    all, about a quarter of an hour on one core
python tools/rehearse_recipes.py qwen3_vl_8b        the rows of some recipes, the others stay
python tools/rehearse_recipes.py --plans            the plans alone, beside the rehearsals in the report
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy

from megatron_vlm.config import RunConfig, derived, missing_settings
from megatron_vlm.extras.plan.plan import RESERVE, KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.rehearsal import rehearse
from megatron_vlm.models.description import Description
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.overrides import apply_overrides, as_settings, split_override
from megatron_vlm.recipes import RECIPES, compose
from megatron_vlm.recipes.published import CONFIGS
from plan_recipes import ROOT, UNTIED, layout

NODE = 8
GPUS = (NODE, 64, 1024)
LONG = {
    "gemma3_vl_4b_64k": "gemma3_vl_4b",
    "qwen3_vl_8b_128k": "qwen3_vl_8b",
    "qwen35_4b_64k": "qwen35_4b",
    "qwen35_9b_64k": "qwen35_9b",
    "qwen35_27b_64k": "qwen35_27b",
    "qwen35_35b_a3b_64k": "qwen35_35b_a3b",
    "qwen35_122b_a10b_64k": "qwen35_122b_a10b",
}  # files of recipes/ -> model
REPORT = ROOT / "reports" / "rehearsal.json"


def main() -> None:
    models = {config.stem: config.stem for config in sorted(CONFIGS.glob("*.json"))} | LONG
    old = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else []
    rows = {name: [row for row in old if row["recipe"] == name] for name in models}
    plans_alone = sys.argv[1:] == ["--plans"]
    for name in list(models) if plans_alone else sys.argv[1:] or list(models):
        run, description = opened(name, models[name])
        if plans_alone:
            known = KnownCosts()
            rows[name] = [planned_again(row, run, description, known) for row in rows[name]]
            write(rows)
            continue
        before, rows[name] = rows[name], []
        for row in rehearsed(name, run, description):
            rows[name].append(row)
            write(rows | {name: rows[name] + [old for old in before if place(old) > place(row)]})
        write(rows)


def place(row: dict) -> tuple[int, int]:
    """Where a row stands among those of its recipe, whose stages have one place."""
    return row["card"], row["gpus"]


def write(rows: dict[str, list[dict]]) -> None:
    text = json.dumps([row for of in rows.values() for row in of], indent=1, ensure_ascii=False)
    REPORT.write_text(text + "\n", encoding="utf-8")


def opened(name: str, model: str) -> tuple[RunConfig, Description]:
    file = ROOT / "recipes" / f"{name}.yaml"
    run = compose(file=file) if name in LONG else compose(recipe=name)
    run = apply_overrides(run, dict.fromkeys(missing_settings(run), "none://"))
    hf_config = load_config(CONFIGS / f"{model}.json")
    hf_config.tie_word_embeddings &= model not in UNTIED
    return run, describe(hf_config)


def roomy(name: str, run: RunConfig) -> RunConfig:
    """The run in the recipe's layout for GPUs of 141 GB."""
    return apply_overrides(run, as_settings(dict(map(split_override, RECIPES[name].roomy.split()))))


def planned_again(row: dict, run: RunConfig, description: Description, known: KnownCosts) -> dict:
    if row["card"] != 80:
        run = roomy(row["recipe"], run)
    plan = make_plan(with_batch(run, row["gpus"]), description, row["gpus"], known)
    return row | {"plan_over_rehearsed": over(plan, row["stage"], row["peak_memory"])}


def over(plan: MemoryPlan, stage: int, peak: int) -> float:
    return round((plan.stages[stage].memory - RESERVE) / peak, 3)


def fewest_of(name: str) -> int:
    """On how many GPUs a recipe begins; a file of recipes/ on a node, unless its recipe needs more."""
    return max(NODE, RECIPES[LONG[name]].gpus) if name in LONG else RECIPES[name].gpus


def rehearsed(name: str, run: RunConfig, description: Description) -> Iterator[dict]:
    fewest = fewest_of(name)
    for gpus in sorted({fewest, *(n for n in GPUS if n % fewest == 0)}):
        began = time.monotonic()
        yield from rows_of(name, with_batch(run, gpus), description, gpus)
        print(f"{name} on {gpus}: {time.monotonic() - began:.0f} s", flush=True)
    if name not in LONG and RECIPES[name].roomy:
        gpus = max(NODE, fewest)
        yield from rows_of(name, with_batch(roomy(name, run), gpus), description, gpus, card=141)


def with_batch(run: RunConfig, gpus: int) -> RunConfig:
    """The run with a larger batch if its own leaves a stage of some data-parallel rank without work."""
    run, parallel = deepcopy(run), run.parallel
    run.train.global_batch_size = max(
        run.train.global_batch_size,
        run.train.micro_batch_size * parallel.pp * gpus // parallel.model_size,
    )
    return run


def rows_of(name: str, run: RunConfig, description: Description, gpus: int, card: int = 80) -> Iterator[dict]:
    plan = make_plan(run, description, gpus)
    ranks = [rehearse(run, description, gpus, rank) for rank in plan.representatives]
    for one in ranks:
        exchanged: Counter[str] = Counter()
        for (group, _), (_, nbytes) in one.exchanged().items():
            exchanged[group] += round(nbytes)
        yield {
            "recipe": name,
            "layout": layout(run),
            "card": card,
            "gpus": gpus,
            "rank": one.rank,
            "stage": one.stage,
            "batch": run.train.global_batch_size,
            "micro_batches": derived(run, gpus)["micro_batches_per_step"],
            "peak_memory": one.peak,
            "plan_over_rehearsed": over(plan, one.stage, one.peak),
            "collective_bytes": dict(exchanged),
        }


if __name__ == "__main__":
    main()
