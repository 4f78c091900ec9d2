"""A recipe of your own: a function with keyword arguments that returns a `RunConfig`.

megatron-vlm train --recipe examples/extend/recipe.py:receipts --train_data_path receipts.jsonl resolution=low
"""

from pathlib import Path
from typing import Literal

from megatron_vlm.config import RunConfig
from megatron_vlm.recipes import load_recipe

HERE = Path(__file__).parent
PIXELS = {"low": 640 * 28**2, "high": 2560 * 28**2}


def receipts(resolution: Literal["low", "high"] = "high", **changes) -> RunConfig:
    """Qwen3-VL 8B on receipts, with LoRA. `changes` are the arguments that all recipes take."""
    config = load_recipe("qwen3_vl_8b")(**{"lr": 1e-4, "dataset_type": "hf", **changes})
    config.data.max_pixels = PIXELS[resolution]
    config.adapter.r = 16
    config.train.objective = f"{HERE}/losses.py:focal"
    config.train.callbacks = [f"{HERE}/callbacks.py:StopAtLoss"]
    return config
