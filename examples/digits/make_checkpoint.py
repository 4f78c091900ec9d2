"""A small checkpoint of random weights to learn the digits with: python make_checkpoint.py gemma3 OUTPUT

The shape of the real family, at sizes for two processor cores.
"""

from __future__ import annotations

import sys

from transformers.utils.logging import disable_progress_bar

from make_digits import ADD_TWO, ONE_IMAGE, READ_TWO
from megatron_vlm.testing.tiny import build_tiny_checkpoint

# A patch is 4x4 pixels of the scan and becomes one visual token: four tokens an image learn twice as fast
# as sixteen. Random weights start at a scale of 1/sqrt(width), not at the 0.02 meant for widths of thousands.
SIZES = {
    "gemma3": {
        "image_size": 56,
        "image_tokens": 4,
        "text": {"num_hidden_layers": 3, "initializer_range": 0.125, "sliding_window": 128},
        "vision": {"hidden_size": 96, "intermediate_size": 192, "patch_size": 28},
    }
}


def make_checkpoint(family: str, output: str, seed: int = 0) -> None:
    if family not in SIZES:
        sys.exit(f"FAMILY={family}: the demo has sizes for {', '.join(SIZES)} only, see {__file__}")
    disable_progress_bar()  # one file of a megabyte
    build_tiny_checkpoint(family, output, corpus=questions(), seed=seed, **SIZES[family])


def questions() -> list[str]:
    """What the tokenizer is trained on, so that each word of the questions becomes one token."""
    asked = [question.replace("<image>", "") for question in (*ONE_IMAGE, *READ_TWO, *ADD_TWO)]
    return [*asked, "user", "model"] * 20


if __name__ == "__main__":
    make_checkpoint(*sys.argv[1:3], *map(int, sys.argv[3:]))
