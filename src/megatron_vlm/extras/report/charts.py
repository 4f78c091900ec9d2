"""The charts of a page: which figures stand in one, and at which steps a curve is drawn."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.extras.report.history import History

# title, unit, the figures of docs/metrics.md as a pattern; each other figure gets a chart of its own
CHARTS = (
    ("Loss", "nats per trained token", r"(valid_)?loss(/.*)?"),
    ("Scores", "", r"(valid_)?(score|accuracy)\b.*|on_export/.*"),
    ("Rewards", "nats", r"margin|reward_.*"),
    ("Learning rate", "", r"lr(_.*)?"),
    ("Gradient norm", "before clipping", r"grad_norm"),
    ("Throughput", "tokens/s", r"tokens_per_second(_per_device)?"),
    ("Images", "images/s on a device", r"images_per_second_per_device"),
    ("Utilisation", "share of the peak", r"mfu"),
    ("Operations", "10¹²/s on a device", r"tflops_per_device"),
    ("Time of a step, and of it the wait for data", "s", r"seconds|data_seconds"),
    ("Memory", "GB of the fullest device", r"peak_memory_gb"),
    ("Padding", "share of the rows' tokens", r"padding"),
    ("Balance of experts", "busiest over mean", r"expert_balance.*"),
    ("Dropped samples", "since the run began", r"dropped_samples"),
)
NO_CURVE = re.compile(r"step|epoch|(valid_)?trained_tokens(/.*)?|(valid_)?samples/.*")
MOST_POINTS = 500  # of a curve: the lowest and the highest value of each stretch of steps
MOST_LINES = 40  # of the table behind a chart

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    label: str
    run: int  # place of its run, which has a colour
    points: Points


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    series: list[Series]

    def data(self) -> dict:
        """The data of the page's script: the steps, and for each series its values there or None."""
        steps = sorted({step for series in self.series for step, _ in series.points})
        curves = [
            {"label": series.label, "run": series.run, "values": self._at(series, steps)}
            for series in self.series
        ]
        return {"steps": steps, "series": curves}

    def table(self) -> tuple[list[float], list[list[float | None]]]:
        """At most MOST_LINES of the steps, the first and the last among them, and the values there."""
        steps = self.data()["steps"]
        count = min(MOST_LINES, len(steps))
        places = sorted({round(number * (len(steps) - 1) / max(count - 1, 1)) for number in range(count)})
        columns = [self._at(series, steps) for series in self.series]
        return [steps[place] for place in places], [[column[place] for column in columns] for place in places]

    @staticmethod
    def _at(series: Series, steps: list[float]) -> list[float | None]:
        known = dict(series.points)
        return [known.get(step) for step in steps]


def charts_of(runs: Sequence[History]) -> list[Chart]:
    """The charts of one run, or of several over each other; a figure that no run has makes none."""
    names = sorted({name for run in runs for name in run.last if not NO_CURVE.fullmatch(name)})
    charts = []
    for title, unit, pattern in CHARTS:
        charts.append((title, unit, [name for name in names if re.fullmatch(pattern, name)]))
        names = [name for name in names if name not in charts[-1][2]]
    charts += [(name, "", [name]) for name in names]
    drawn = [Chart(title, unit, _series(runs, figures)) for title, unit, figures in charts]
    return [chart for chart in drawn if chart.series]


def _series(runs: Sequence[History], names: list[str]) -> list[Series]:
    made = []
    for place, run in enumerate(runs):
        for name in names:
            points = [(row["step"], row[name]) for row in run.rows if name in row]
            label = name if len(runs) == 1 else f"{run.folder.name} · {name}"
            made += [Series(label, place, thinned(points))] if points else []
    return made


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many of the points: of each stretch the lowest and the highest, so that a spike stays."""
    if len(points) <= most:
        return points
    kept: set[int] = {0, len(points) - 1}
    stretches = most // 2 - 1
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda n: points[n][1]), max(stretch, key=lambda n: points[n][1])}
    return [points[number] for number in sorted(kept)]
