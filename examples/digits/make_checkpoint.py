"""Make a small checkpoint of random weights for the digits: python make_checkpoint.py gemma3 OUTPUT

It has the shape of the real family, at sizes for two processor cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from make_digits import ADD_TWO, ONE_IMAGE, READ_TWO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `tiny` is not installed

from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint  # noqa: E402


def make_checkpoint(family: str, output: str, seed: int = 0) -> None:
    """Write the checkpoint. Raises KeyError on an unknown family."""
    disable_progress_bar()  # one file of a few megabytes
    build_tiny_checkpoint(family, output, corpus=questions(), seed=seed, **TINY_FAMILIES[family].demo)


def questions() -> list[str]:
    """The text on which the tokenizer is trained, so that each word of the prompts becomes one token."""
    asked = [question.replace("<image>", "") for question in (*ONE_IMAGE, *READ_TWO, *ADD_TWO)]
    templates = ["user", "model", "assistant", "system", "You are a helpful assistant."]
    return [*asked, *templates] * 20


if __name__ == "__main__":
    make_checkpoint(*sys.argv[1:3], *map(int, sys.argv[3:]))
