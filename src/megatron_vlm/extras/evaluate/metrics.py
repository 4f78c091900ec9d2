"""Metrics by name: what a sample's answer scores, and the score of all samples with its interval."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.evaluate import formulas
from megatron_vlm.extras.evaluate.formulas import Box, NotScored
from megatron_vlm.files import calling, object_of
from megatron_vlm.messages import printable, suggestion

RESAMPLES = 1000
NUMBERS_AT_ONCE = 1 << 22
INTERVAL = (2.5, 97.5)  # percentiles
BOX_IS_RIGHT = 0.5

# name -> (points or errors, what they are a share of): a score is a sum of the first over one of the second
Parts = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Judged:
    """An answer to be judged. `boxes` reads the boxes of a text as the model's family writes them."""

    question: str
    answer: str
    references: Sequence[str]
    boxes: Callable[[str], list[Box]]


@dataclass(frozen=True)
class Metric:
    """A way to score an answer. `parts` gives one figure or several, and raises NotScored."""

    parts: Callable[[Judged], Parts]
    higher_is_better: bool = True


def _of_texts(name: str, formula: Callable[[str, Sequence[str]], float]) -> Metric:
    return Metric(lambda given: {name: (formula(given.answer, given.references), 1.0)})


def _multiple_choice(given: Judged) -> Parts:
    score = formulas.multiple_choice(given.answer, given.references, given.question)
    return {"multiple_choice": (score, 1.0)}


def _boxes(given: Judged) -> Parts:
    """Also of several references: they are boxes of one answer, which must have them all."""
    wanted = [box for reference in given.references for box in given.boxes(reference)]
    if not wanted:
        raise NotScored("its reference has no box")
    shares = formulas.overlaps(given.boxes(given.answer), wanted)
    right = sum(share >= BOX_IS_RIGHT for share in shares)
    return {"iou": (sum(shares) / len(shares), 1.0), "iou_at_0.5": (right / len(shares), 1.0)}


def _error_rate(name: str, cut: Callable[[str], Sequence[str]]) -> Metric:
    def parts(given: Judged) -> Parts:
        return {name: formulas.errors_and_length(cut(given.answer), list(map(cut, given.references)))}

    return Metric(parts, higher_is_better=False)


METRICS = {
    "exact_match": _of_texts("exact_match", formulas.exact_match),
    "contained": _of_texts("contained", formulas.contained),
    "relaxed": _of_texts("relaxed", formulas.relaxed_match),
    "anls": _of_texts("anls", formulas.anls),
    "vqa": _of_texts("vqa", formulas.vqa_accuracy),
    "multiple_choice": Metric(_multiple_choice),
    "boxes": Metric(_boxes),
    "wer": _error_rate("wer", str.split),
    "cer": _error_rate("cer", str.strip),
}


def metric_of(name: str) -> Metric:
    """The metric of a name, or the function of a user's Python file, `file.py:name`. Raises ConfigError."""
    if found := re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", name):
        return _users_metric(Path(found[1]), found[2])
    if name not in METRICS:
        raise ConfigError(f"metric {printable(name)}: there is none{suggestion(name, METRICS)}")
    return METRICS[name]


def _users_metric(file: Path, name: str) -> Metric:
    """A metric that calls `name(answer, references, question)`, which returns a number, or numbers by name.
    More is better, unless the function has `higher_is_better = False`."""
    place = f"metric {printable(file)}:{name}"
    if not file.is_file():
        raise ConfigError(f"{place}: there is no such file; give its path.")
    function = object_of(place, file, name)
    if not callable(function):
        raise ConfigError(f"{place}: the file has no function of this name.")

    def parts(given: Judged) -> Parts:
        with calling(place, file):
            score = function(given.answer, list(given.references), given.question)
        scores = score if isinstance(score, Mapping) else {name: score}
        try:
            numbers = {str(figure): float(value) for figure, value in scores.items()}
        except (TypeError, ValueError, OverflowError):
            numbers = {"": math.nan}
        if not all(map(math.isfinite, numbers.values())):
            said = f"{printable(repr(score))} for the answer {printable(repr(given.answer))}"
            raise ConfigError(f"{place}: it returned {said}; return a finite number, or a dict of them.")
        return {figure: (number, 1.0) for figure, number in numbers.items()}

    return Metric(parts, getattr(function, "higher_is_better", True))


@dataclass(frozen=True)
class Score:
    """A score over samples, and the bounds of its 95 % interval."""

    score: float
    low: float
    high: float
    samples: int
    higher_is_better: bool

    def __str__(self) -> str:
        return f"{self.score:.4f} ({self.low:.4f} to {self.high:.4f}, {self.samples} samples)"


def scores_of(samples: Sequence[Parts], higher: Mapping[str, bool], seed: int = 0) -> dict[str, Score]:
    """The score of each figure over the samples that have it; `higher` says for each whether more is better.

    The interval is the bootstrap's (Efron 1979): percentiles of the score over samples drawn with
    replacement. The same seed gives the same interval. A score without a sum to divide by is left out.
    """
    scores = {}
    for name, better in higher.items():
        pairs = np.array([parts[name] for parts in samples if name in parts]).reshape(-1, 2)
        points, lengths = pairs.T
        if lengths.sum() <= 0:
            continue
        drawn = np.concatenate(list(_resampled(pairs, np.random.default_rng(seed))))
        low, high = np.percentile(drawn, INTERVAL)
        score = points.sum() / lengths.sum()
        scores[name] = Score(float(score), float(low), float(high), len(pairs), better)
    return scores


def _resampled(pairs: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The scores of RESAMPLES draws, some at a time."""
    count = len(pairs)
    at_once = max(1, NUMBERS_AT_ONCE // count)
    for first in range(0, RESAMPLES, at_once):
        draws = rng.integers(0, count, (min(at_once, RESAMPLES - first), count))
        points, lengths = pairs[draws].sum(1).T
        yield points / np.where(lengths > 0, lengths, 1)


def parts_of(metrics: Mapping[str, Metric], given: Judged) -> tuple[Parts, dict[str, str], dict[str, Any]]:
    """(parts of all figures, why a metric gives none, whether more is better of each figure)."""
    parts: Parts = {}
    missing: dict[str, str] = {}
    higher: dict[str, bool] = {}
    for name, metric in metrics.items():
        try:
            of_metric = metric.parts(given)
        except NotScored as why:
            missing[name] = str(why)
            continue
        parts |= of_metric
        higher |= dict.fromkeys(of_metric, metric.higher_is_better)
    return parts, missing, higher
