"""Plan every recipe of a real size and write what its GPUs hold into docs/recipes.md.

python tools/recipe_table.py            rewrite the table
"""

from __future__ import annotations

from pathlib import Path

import torch
from parity_table import ROOT, replaced
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from megatron_vlm.config import ParallelConfig, fewest_processes
from megatron_vlm.planning import make_plan
from megatron_vlm.recipes import load_recipe

HEAD = "| recipe | parameters | layout | GPUs | GB per GPU | on 2 × the GPUs | on 4 × | GFLOP per token |"
CONFIGS = ROOT / "tests" / "hf_configs"  # of the published models, one for each recipe


def line(config: Path) -> str:
    run = load_recipe(config.stem)(train_data_path="none://")
    hf_config, gpus = AutoConfig.from_pretrained(config), fewest_processes(run.parallel)
    plans = [make_plan(run, hf_config, gpus * times) for times in (1, 2, 4)]
    flops = (plans[0].language_model_flops + plans[0].tower_flops) / 1e9
    cells = (
        f"`{config.stem}`",
        f"{parameters(hf_config) / 1e9:.2f} B",
        layout(run.parallel),
        gpus,
        *(f"{plan.memory / 1e9:.0f}" for plan in plans),
        f"{flops:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def parameters(hf_config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(hf_config)
    return sum(parameter.numel() for parameter in model.parameters())


def layout(parallel: ParallelConfig) -> str:
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep}
    return " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "–"


def main() -> None:
    rows = [HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(line, sorted(CONFIGS.glob("*.json")))]
    page = ROOT / "docs" / "recipes.md"
    page.write_text(replaced(page.read_text(encoding="utf-8"), "\n".join(rows), "plan"), encoding="utf-8")


if __name__ == "__main__":
    main()
