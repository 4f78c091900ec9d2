"""The charts of a page: which metrics stand in one, and at which steps a curve is drawn."""

import re
from collections.abc import Sequence
from itertools import batched
from operator import itemgetter
from typing import Any

from megatron_vlm.extras.report.history import History

# title, unit, the metrics of docs/metrics.md as a pattern; each other metric gets a chart of its own
CHARTS = (
    ("Loss", "nats per trained token", r"(valid_)?loss(/.*)?"),
    ("Scores", "", r"(valid_)?(score|accuracy)\b.*|on_export/.*"),
    ("Rewards", "nats", r"margin|reward_.*"),
    ("Learning rate", "", r"lr(_.*)?"),
    ("Gradient norm", "before clipping", r"grad_norm"),
    ("Throughput", "tokens/s", r"tokens_per_second(_per_device)?"),
    ("Utilisation", "share of the peak", r"mfu"),
    ("Time of a step, and of it the wait for data", "s", r"seconds|data_seconds"),
    ("Memory", "GB of the fullest device", r"peak_memory_gb"),
    ("Balance of experts", "busiest over mean", r"expert_balance.*"),
)
NO_CURVE = re.compile(r"step|epoch|(valid_)?trained_tokens(/.*)?|(valid_)?samples/.*")
MOST_POINTS = 500  # of a curve: the lowest and the highest value of each stretch of steps

Points = list[tuple[float, float]]


def charts_of(runs: Sequence[History]) -> list[dict[str, Any]]:
    """The charts of one run, or of several over each other, as data of the page's script.

    A chart has `title`, `unit`, `steps` and `series`; a series `label`, `run` (its place, which has a colour)
    and `values`, None where it has no point.
    """
    names = sorted({name for run in runs for name in run.last if not NO_CURVE.fullmatch(name)})
    groups = []
    for title, unit, pattern in CHARTS:
        groups.append((title, unit, [name for name in names if re.fullmatch(pattern, name)]))
        names = [name for name in names if name not in groups[-1][2]]
    groups += [(name, "", [name]) for name in names]
    return [_chart(runs, title, unit, metrics) for title, unit, metrics in groups if metrics]


def _chart(runs: Sequence[History], title: str, unit: str, metrics: list[str]) -> dict[str, Any]:
    series = []
    curves = []
    for place, run in enumerate(runs):
        for name in metrics:
            curve = dict(thinned([(row["step"], row[name]) for row in run.rows if name in row]))
            if curve:
                label = name if len(runs) == 1 else f"{run.folder.name} · {name}"
                series.append({"label": label, "run": place})
                curves.append(curve)
    steps = sorted({step for curve in curves for step in curve})
    for drawn, curve in zip(series, curves, strict=True):
        drawn["values"] = [curve.get(step) for step in steps]
    return {"title": title, "unit": unit, "steps": steps, "series": series}


def thinned(points: Points, most_points: int = MOST_POINTS) -> Points:
    """At most so many of the points: of each stretch the lowest and the highest, so that a spike stays."""
    if len(points) <= most_points:
        return points
    kept = {points[0], points[-1]}
    length = -(-len(points) // (most_points // 2 - 1))
    for stretch in batched(points, length):
        kept |= {min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))}
    return sorted(kept)
