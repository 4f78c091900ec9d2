"""Make a small checkpoint of random weights for the digits: python make_checkpoint.py gemma3 OUTPUT

It has the shape of the real family, at sizes for two processor cores. With `parts` in place of a family, a
SigLIP2 and a Llama are made, in OUTPUT/siglip2 and OUTPUT/llama. `make_checkpoint.py boxes OUTPUT` makes a
Qwen3-VL that sees canvases with digits on them. Its tower is then trained on images, of training scans alone,
as the tower of a published model is before that model is made of it; its language model stays random.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from make_boxes import WHERE, WHICH
from make_digits import ADD_TWO, DOCUMENT, ONE_IMAGE, READ_TWO
from train_tower import BATCH, train_tower

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `tiny` is not installed

from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint  # noqa: E402
from tiny.family import DEMO_TEXT, DEMO_TOWER  # noqa: E402
from tiny.parts import build_language_model, build_tower  # noqa: E402

TURNS = ["user", "model", "assistant", "system", "You are a helpful assistant."]  # of templates
# Sizes with which each cell of a canvas is one visual token
FOR_BOXES = {
    "image_size": 64,
    "patch_size": 8,
    "text": DEMO_TEXT,
    "vision": DEMO_TOWER | {"depth": 2, "deepstack_visual_indexes": [], "patch_size": 8},
}


# other text models of a family: demo -> the family, and its tiny variant
OF_PARTS = {"mistral4": ("mistral3", "mistral4"), "gemma4_e2b": ("gemma4", "small")}


def make_checkpoint(demo: str, output: str, seed: int = 0) -> None:
    """Write the checkpoint of a family, or of `OF_PARTS`. Raises KeyError on an unknown family."""
    disable_progress_bar()  # one file of a few megabytes
    family, variant = OF_PARTS.get(demo, (demo, None))
    parts = TINY_FAMILIES[family]
    further = parts.variants[variant] if variant else {}
    sizes = {key: {**value, **further.get(key, {})} for key, value in parts.demo.items() if key in further}
    build_tiny_checkpoint(family, output, corpus=questions(), seed=seed, **parts.demo | further | sizes)


def make_for_boxes(output: str) -> None:
    """Write a checkpoint whose language model is random, and whose tower was trained on images."""
    disable_progress_bar()
    asked = [question.replace("<image>", "").replace("<ref-object>", "7") for question in (WHERE, WHICH)]
    corpus = [*asked, *TURNS, "[1, 2, 3, 4]"] * 20
    build_tiny_checkpoint("qwen3_vl", output, corpus=corpus, **FOR_BOXES)
    started = time.monotonic()
    losses = train_tower(Path(output))
    print(
        f"the tower's loss on {len(losses)} x {BATCH} images of training scans:"
        f" {losses[0]:.2f} at first, {losses[-1]:.2f} in the end ({time.monotonic() - started:.0f} s)"
    )


def make_parts(output: str) -> None:
    """Write the two checkpoints that are composed."""
    disable_progress_bar()
    set_verbosity_error()  # of default ids beyond the toy size of a text half
    build_tower("siglip2", Path(output, "siglip2"), **DEMO_TOWER)
    build_language_model("llama", Path(output, "llama"), corpus=questions(), head_dim=32, **DEMO_TEXT)


def questions() -> list[str]:
    """The text on which the tokenizer is trained, so that each word of the prompts becomes one token."""
    asked = [question.replace("<image>", "") for question in (*ONE_IMAGE, *READ_TWO, *ADD_TWO)]
    return [*asked, *TURNS, DOCUMENT, "This is a"] * 20


if __name__ == "__main__":
    if sys.argv[1] == "parts":
        make_parts(sys.argv[2])
    elif sys.argv[1] == "boxes":
        make_for_boxes(sys.argv[2])
    else:
        make_checkpoint(*sys.argv[1:3], *map(int, sys.argv[3:]))
