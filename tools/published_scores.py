"""Write tests/published_scores.json: what lmms-eval scores for some answers.

pip install --no-deps --target FOLDER lmms-eval loguru
PYTHONPATH=FOLDER python tools/published_scores.py

`tests/unit/core/test_scores.py` compares the package's formulas with this table, without these packages.
"""

from __future__ import annotations

import ast
import json
import random
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from difflib import SequenceMatcher
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parent.parent / "tests" / "published_scores.json"
ANSWERS = (
    "| |cat|Cat| a cat |The cat.|two cats|2 cats|a  black\ncat|Paris, France|12|12.5|12.6|13|12%|"
    "0.12|0.1249|1,200|1200|1 200|-3|0|0.0|nan|yes|Yes, it is.|no|it isnt|isn't|won't|wont|oclock|"
    "a/b|ab|a - b|3.5 m|the quick brown fox|the quik brown fox|quick brown|brown fox quick the|état|"
    "etat|3.5 m|[x]|x;y|12,5 kg|e.g. this|one|ten|none|couldnt've|somebody'd|don't know"
).split("|")


def text_pairs() -> list[tuple[str, str]]:
    """Short answers that are alike, some that are not, and texts with random changes."""
    pairs = list(product(ANSWERS, ANSWERS))
    rng = random.Random(0)
    alike = [pair for pair in pairs if SequenceMatcher(None, *pair).ratio() >= 0.4]
    chosen = alike + rng.sample(pairs, 60)
    for _ in range(60):
        words = [
            rng.choice(["lo", "rem", "ip", "sum", "dolor", "12", "sit-amet"])
            for _ in range(rng.randint(1, 30))
        ]
        changed = [word for word in words if rng.random() > 0.2]
        changed = [rng.choice(["x", "Dolor", word]) if rng.random() < 0.2 else word for word in changed]
        chosen.append((" ".join(changed), " ".join(words)))
    return chosen


def function(module: str, name: str) -> Callable:
    """A function of a module's file, without what the module imports."""
    file = Path(find_spec("lmms_eval").submodule_search_locations[0], *module.split(".")).with_suffix(".py")
    wanted = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in ast.parse(file.read_text()).body if isinstance(node, wanted)]
    for node in body:
        node.decorator_list = []
    space: dict = {"np": np, "random": random, "re": re, "statistics": statistics, "Dataset": object}
    for node in body:
        with suppress(NameError, AttributeError):  # a base class of a package that is not needed
            exec(compile(ast.Module([node], []), str(file), "exec"), space)
    return space[name]


def texts() -> list[list]:
    """[answer, reference, anls]"""
    anls = function("api.metrics", "anls")
    return [[answer, reference, anls([reference], [answer])["anls"]] for answer, reference in text_pairs()]


def boxes() -> list[list]:
    """[box, box, intersection over union]"""
    overlap = function("tasks.refcoco.utils_rec", "compute_iou")
    rng = random.Random(2)
    rows = []
    for _ in range(100):
        pair = []
        for _ in range(2):
            x, y = rng.randint(0, 60), rng.randint(0, 60)
            pair.append([x, y, x + rng.randint(1, 40), y + rng.randint(1, 40)])
        rows.append([*pair, overlap(*pair)])
    return rows


def main() -> None:
    table = {"versions": {"lmms-eval": version("lmms-eval")}, "texts": texts(), "boxes": boxes()}
    lines = []
    for key, value in table.items():
        rows = ",\n".join(f"  {json.dumps(row)}" for row in value) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n{rows}\n ]" if rows else json.dumps(value)))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
