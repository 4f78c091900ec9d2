"""Metrics by name: the formulas of published benchmarks, each with its source, and a user's own function.

A metric takes an answer as `Judged` and returns a number, or several by name. More is better, unless the
function has `higher_is_better = False`. tests/unit/core/test_scores.py compares with lmms-eval.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.imports import calling, is_users, load_function
from megatron_vlm.messages import suggestion

ANLS_THRESHOLD = 0.5
Box = Sequence[float]  # x and y of two corners


@dataclass(frozen=True)
class Judged:
    """An answer to be judged. `boxes` reads the boxes of a text as the model's family writes them."""

    question: str
    answer: str
    references: Sequence[str]
    boxes: Callable[[str], list[Box]]


Metric = Callable[[Judged], float | Mapping[str, float]]


@dataclass(frozen=True)
class Score:
    """The mean of a figure over the samples that have it."""

    score: float
    samples: int
    higher_is_better: bool


def exact_match(judged: Judged) -> float:
    """1 if the answer is one of the references, character by character, without white space around it.

    The exact match of the Hugging Face metric `exact_match` with its default settings.
    """
    return float(judged.answer.strip() in [reference.strip() for reference in judged.references])


def contained(judged: Judged) -> float:
    """1 if the answer contains a reference, in lower case and with newlines as spaces.

    OCRBench, arXiv 2305.07895: all its tasks but handwritten formulas.
    """

    def plain(text: str) -> str:
        return text.lower().strip().replace("\n", " ")

    return float(any(plain(reference) in plain(judged.answer) for reference in judged.references))


def anls(judged: Judged) -> float:
    """1 - edit distance / longer length for the nearest reference, 0 below 0.5.

    Average normalized Levenshtein similarity, arXiv 1905.13648, as DocVQA's own code computes it: distance in
    lower case with single spaces, lengths of the texts as they stand.
    """

    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    def similarity(reference: str) -> float:
        longer = max(len(judged.answer), len(reference))
        return 1 - edit_distance(plain(judged.answer), plain(reference)) / longer if longer else 1.0

    best = max(map(similarity, judged.references))
    return best if best >= ANLS_THRESHOLD else 0.0


def edit_distance(text: str, other: str) -> int:
    """The fewest letters to insert, delete and replace that make `other` of `text` (Levenshtein)."""
    letters = np.array([ord(letter) for letter in other], int)
    steps = np.arange(len(other) + 1)
    distances = steps.copy()
    for row, letter in enumerate(text, start=1):
        best = np.minimum(distances[1:] + 1, distances[:-1] + (letters != ord(letter)))
        # an insertion costs 1 for each place, so the best start of insertions is a running minimum
        distances = np.minimum.accumulate(np.concatenate([[row], best]) - steps) + steps
    return int(distances[-1])


def boxes(judged: Judged) -> dict[str, float]:
    """The mean overlap of an answer's and the references' boxes, and the share of at least 0.5.

    Several references are boxes of one answer, which must have them all. One box of each is RefCOCO's case,
    arXiv 1608.00272. Raises BadSample if a reference has no box.
    """
    expected = [box for reference in judged.references for box in judged.boxes(reference)]
    if not expected:
        raise BadSample("no_box", "its reference has no box")
    shares = overlaps(judged.boxes(judged.answer), expected)
    right = sum(share >= 0.5 for share in shares)
    return {"iou": sum(shares) / len(shares), "iou_at_0.5": right / len(shares)}


def overlaps(boxes: Sequence[Box], expected: Sequence[Box]) -> list[float]:
    """The intersection over union of each pair of an answer's and an expected box, 0 for a box left over.

    Each box is in one pair, and the pairs are as good as they can be.
    """
    import torch
    from scipy.optimize import linear_sum_assignment
    from torchvision.ops import box_iou

    def corners(boxes: Sequence[Box]) -> torch.Tensor:  # (N, 4) fp64, the upper left corner first
        tensor = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 2, 2)
        return tensor.sort(dim=1).values.flatten(1)

    table = box_iou(corners(boxes), corners(expected)).nan_to_num().numpy()
    paired = table[linear_sum_assignment(table, maximize=True)].tolist()
    return paired + [0.0] * (max(table.shape) - len(paired))


METRICS = {"exact_match": exact_match, "contained": contained, "anls": anls, "boxes": boxes}


def metric_of(name: str) -> Metric:
    """The metric of a name, or a user's function, `FILE.py:NAME`. Raises ConfigError."""
    if is_users(name):
        return _users_metric(name)
    if name not in METRICS:
        raise ConfigError(f"metric {name}: there is none{suggestion(name, METRICS)}")
    return METRICS[name]


def _users_metric(name: str) -> Metric:
    """A metric that calls `function(answer, references, question)`, which returns what a metric returns."""
    place = f"metric {name}"
    function = load_function(place, name)

    def metric(judged: Judged) -> dict[str, float]:
        with calling(place, name):
            result = function(judged.answer, list(judged.references), judged.question)
            figures = result if isinstance(result, Mapping) else {name.rpartition(":")[2]: result}
            numbers = {figure: float(value) for figure, value in figures.items()}
        if not all(map(math.isfinite, numbers.values())):
            raise ConfigError(f"{place}: it returned {result!r}; return finite numbers.")
        return numbers

    metric.higher_is_better = getattr(function, "higher_is_better", True)
    return metric
