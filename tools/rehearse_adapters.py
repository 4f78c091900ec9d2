"""Rehearse a step of LoRA and of full fine-tuning for every model size: reports/rehearsal_lora.json.

Each is rehearsed on one GPU, whatever it would hold; where that is more than 80 or 141 GB, on the fewest GPUs
of that size, in the quickest layout by its plan; and recipes/*_lora.yaml for several GPUs as they are.

python tools/rehearse_adapters.py                what the report lacks
python tools/rehearse_adapters.py qwen3_vl_8b    some models again
python tools/rehearse_adapters.py --plans        the plans alone, beside the rehearsals in the report
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from megatron_vlm.config import RunConfig, all_settings, fewest_processes
from megatron_vlm.extras.plan.plan import RESERVE, KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.rehearsal import rehearse
from megatron_vlm.extras.plan.search import MOST_REHEARSED, TO_FIT, planned_layouts
from megatron_vlm.models.description import Description
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import compose
from megatron_vlm.recipes.published import CONFIGS
from plan_recipes import ROOT, layout, parameters
from rehearse_recipes import opened, over, with_batch

CAPACITIES = (80, 141)  # GB of a GPU
REPORT = ROOT / "reports" / "rehearsal_lora.json"
LORA = {"adapter.r": 16, "adapter.lora_alpha": 32, "train.global_batch_size": 128}  # as recipes/*_lora.yaml
ALONE = {"parallel.tp": 1, "parallel.pp": 1, "parallel.vpp": 1, "parallel.ep": 1}
SETTLED = (*ALONE, "model.recompute", "train.global_batch_size")  # by a row
CHANGES = {change for changes in TO_FIT for change in changes}
BYTES = {"lora": 2, "full": 18}  # of a parameter, on all GPUs together
ON_ONE = (("lora", "none"), ("lora", "full"), ("full", "full"))  # what is trained, what is recomputed


def main() -> None:
    models = [config.stem for config in sorted(CONFIGS.glob("*.json"))]
    plans_alone = sys.argv[1:] == ["--plans"]
    again = [] if plans_alone else sys.argv[1:]
    old = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else []
    rows = {name: [row for row in old if row["model"] == name and name not in again] for name in models}
    for name in again or models:
        runs, description = runs_of(name)
        if plans_alone:
            known = {trained: KnownCosts() for trained in runs}
            for place, row in enumerate(rows[name]):
                trained = row["trained"]
                rows[name][place] = planned_again(row, runs[trained], description, known[trained])
            continue
        began = time.monotonic()
        for row in missing_rows(name, runs, description, rows[name]):
            rows[name].append(row)
            write(rows)
            print(f"{words(row)}; {time.monotonic() - began:.0f} s", flush=True)
            began = time.monotonic()
    write(rows)


def write(rows: dict[str, list[dict]]) -> None:
    text = json.dumps([row for of in rows.values() for row in of], indent=1, ensure_ascii=False)
    REPORT.write_text(text + "\n", encoding="utf-8")


def words(row: dict) -> str:
    memory = f"{row['memory'] / 1e9:.1f} GB, the plan without its reserve {row['plan_over_rehearsed']} of it"
    return f"{row['model']}, {row['trained']}, {row['case']}: {row['gpus']} GPUs, {row['layout']}: {memory}"


def runs_of(name: str) -> tuple[dict[str, RunConfig], Description]:
    """The recipe, and the same with adapters: by a file of recipes/, or as those files are."""
    run, description = opened(name, name)
    run = apply_overrides(run, {"optimizer.offload": False})  # some recipes do
    lora, file = apply_overrides(run, ALONE | LORA), ROOT / "recipes" / f"{name}_lora.yaml"
    if file.exists():
        lora = compose(file=file, arguments={"train_data_path": "none://"})
    return {"full": run, "lora": lora}, description


def missing_rows(
    name: str, runs: dict[str, RunConfig], description: Description, rows: list[dict]
) -> Iterator[dict]:
    """The rows of a model that are not in `rows`, to which each is added before the next is made."""
    about = {"model": name, "parameters": parameters(description.hf_config)}
    have = {(row["trained"], row["case"]) for row in rows}
    for trained, recompute in ON_ONE:
        case = {"trained": trained, "case": f"one GPU, recompute {recompute}"}
        if tuple(case.values()) not in have:
            run = apply_overrides(runs[trained], ALONE | {"model.recompute": recompute})
            yield about | case | rehearsed(make_plan(run, description, 1))
    own = fewest_processes(runs["lora"].parallel)
    if own > 1 and ("lora", "recipe") not in have:
        plan = make_plan(runs["lora"], description, own)
        yield about | {"trained": "lora", "case": "recipe"} | rehearsed(plan)
    for capacity in CAPACITIES:
        for trained, run in runs.items():
            alone = [row["memory"] for row in rows if row["trained"] == trained and row["gpus"] == 1]
            case = {"trained": trained, "case": f"fewest of {capacity} GB"}
            if min(alone) > capacity * 1e9 and tuple(case.values()) not in have:
                held = about["parameters"] * BYTES[trained]
                yield about | case | fewest(run, description, capacity * 1e9, held)


def fewest(run: RunConfig, description: Description, capacity: float, held: float) -> dict:
    """On the least power of two of GPUs whose plan and rehearsal say that they hold it. The model alone takes
    `held` bytes."""
    for gpus in (1 << power for power in range(1, 10)):
        enough = gpus * capacity >= held
        plans = planned_layouts(with_batch(run, gpus), description, gpus, capacity) if enough else []
        # as they are, without what TO_FIT changes
        unchanged = [plan for settings, plan in plans if not CHANGES & set(settings)]
        for plan in unchanged[:MOST_REHEARSED]:
            row = rehearsed(plan)
            if row["memory"] <= capacity:
                return row
    raise SystemExit(f"{run.name}: no layout of up to {gpus} GPUs holds it")


def rehearsed(plan: MemoryPlan) -> dict:
    """The numbers of the stage that has the most by the plan, on its first rank."""
    run, stage = plan.config, plan.fullest
    one = rehearse(run, plan.description, plan.gpus, stage * plan.gpus // run.parallel.pp)
    return {
        "settings": {key: value for key, value in all_settings(run).items() if key in SETTLED},
        "layout": layout(run),
        "gpus": plan.gpus,
        "rank": one.rank,
        "stage": stage,
        "trained_bytes": one.gradients,
        "peak_memory": one.peak,
        "memory": one.peak + RESERVE,
        "plan_over_rehearsed": over(plan, stage, one.peak),
    }


def planned_again(row: dict, run: RunConfig, description: Description, known: KnownCosts) -> dict:
    plan = make_plan(apply_overrides(run, row["settings"]), description, row["gpus"], known)
    return row | {"plan_over_rehearsed": over(plan, row["stage"], row["peak_memory"])}


if __name__ == "__main__":
    main()
