"""Plan every recipe of a real size on the fewest GPUs, twice and four times as many: reports/plan.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig

from megatron_vlm.config import RunConfig, derived
from megatron_vlm.extras.plan.plan import KnownCosts, MemoryPlan, make_plan
from megatron_vlm.extras.plan.search import PEAK, estimated_seconds
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes import RECIPES, load_recipe
from megatron_vlm.recipes.published import CONFIGS

# the weights have their own output layer, which config.json does not say: see `models.weights.files`
UNTIED = ("ministral3_8b", "ministral3_14b", "mistral_small_3_24b")
ROOT = Path(__file__).resolve().parent.parent


def planned(config: Path) -> dict:
    run = load_recipe(config.stem)(train_data_path="none://")
    hf_config, gpus = load_config(config), RECIPES[config.stem].gpus
    hf_config.tie_word_embeddings &= config.stem not in UNTIED
    description, known = describe(hf_config), KnownCosts()
    plans = [make_plan(run, description, gpus * times, known) for times in (1, 2, 4)]
    return {
        "recipe": config.stem,
        "parameters": parameters(hf_config),
        "layout": layout(run),
        "gpus": gpus,
        "bytes": [round(plan.memory) for plan in plans],
        "utilisation": round(estimated_utilisation(plans[0]), 2),
    }


def estimated_utilisation(plan: MemoryPlan) -> float:
    """Return which share of the GPUs' peak the operations of a step take that no recomputation repeats."""
    once = apply_overrides(plan.config, ["model.recompute=none"])
    flops = sum(stage.flops for stage in make_plan(once, plan.description, plan.gpus).stages)
    micro_batches = derived(plan.config, plan.gpus)["micro_batches_per_step"]
    return flops / len(plan.stages) * micro_batches / (estimated_seconds(plan) * PEAK)


def parameters(hf_config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(hf_config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def layout(run: RunConfig) -> str:
    sizes = {name: getattr(run.parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    parts += ["overlapped"] * (run.parallel.tp_comm_overlap and run.parallel.tp > 1)
    if run.model.recompute == "full":
        layers = run.model.recompute_layers
        parts.append("recomputed" if layers is None else f"{layers or 'tower'} recomputed")
    parts += ["Adam offloaded"] * run.optimizer.offload
    parts += ["bf16 gradients"] * (not run.optimizer.reduce_in_fp32)
    return " · ".join(parts) or "–"


def main() -> None:
    report = [planned(config) for config in sorted(CONFIGS.glob("*.json"))]
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (ROOT / "reports" / "plan.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
