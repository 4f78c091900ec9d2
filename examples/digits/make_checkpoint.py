"""A small checkpoint of random weights to learn the digits with: python make_checkpoint.py gemma3 OUTPUT

The shape of the real family, at sizes for two processor cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from make_digits import ADD_TWO, ONE_IMAGE, READ_TWO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `tiny` is not installed

from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

# Every family sees a digit as four visual tokens of 4x4 pixels of the scan: they learn twice as fast as
# sixteen. Random weights start at a scale of 1/sqrt(width), not at the 0.02 meant for widths of thousands,
# at which the tower's features are too faint to be noticed.
TEXT = {"num_hidden_layers": 3, "initializer_range": 0.125}
TOWER = {"hidden_size": 96, "intermediate_size": 192, "initializer_range": 0.1}
QWEN3_TOWER = {**TOWER, "depth": 2, "deepstack_visual_indexes": [0]}
SIZES = {  # what FAMILY may be -> the arguments of build_tiny_checkpoint
    "gemma3": {
        "family": "gemma3",
        "image_size": 56,
        "image_tokens": 4,
        "text": {**TEXT, "sliding_window": 128},
        "vision": {"hidden_size": 96, "intermediate_size": 192, "patch_size": 28},
    },
    "ministral3": {"family": "mistral3", "image_size": 56, "text": TEXT, "vision": TOWER},
    "qwen25_vl": {
        "family": "qwen2_5_vl",
        "image_size": 56,
        "text": TEXT,
        "vision": {**TOWER, "depth": 2, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {"family": "qwen3_vl", "image_size": 64, "text": TEXT, "vision": QWEN3_TOWER},
    "qwen3_vl_moe": {
        "family": "qwen3_vl_moe",
        "image_size": 64,
        "text": {**TEXT, "num_experts": 4, "num_experts_per_tok": 2},
        "vision": QWEN3_TOWER,
    },
    "glm_45v": {
        "family": "glm4v_moe",
        "image_size": 56,
        "text": {**TEXT, "hidden_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        "vision": {**TOWER, "out_hidden_size": 96},  # the width of its MLPs as well: at 64 it learns slowly
    },
}


def make_checkpoint(family: str, output: str, seed: int = 0) -> None:
    """Raises KeyError on a family that is not in SIZES."""
    disable_progress_bar()  # one file of a few megabytes
    build_tiny_checkpoint(path=output, corpus=questions(), seed=seed, **SIZES[family])


def questions() -> list[str]:
    """What the tokenizer is trained on, so that each word of the prompts becomes one token."""
    asked = [question.replace("<image>", "") for question in (*ONE_IMAGE, *READ_TWO, *ADD_TWO)]
    templates = ["user", "model", "assistant", "system", "You are a helpful assistant."]
    return [*asked, *templates] * 20


if __name__ == "__main__":
    make_checkpoint(*sys.argv[1:3], *map(int, sys.argv[3:]))
