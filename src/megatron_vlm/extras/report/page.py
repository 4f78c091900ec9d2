"""The page of one run, or of several over each other."""

import json
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import batched
from operator import itemgetter
from statistics import fmean
from typing import Any

from megatron_vlm.callbacks.completions import last_answers
from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.extras.pages import key_facts, render
from megatron_vlm.extras.report.history import History, read_drops
from megatron_vlm.files import read_text
from megatron_vlm.overrides import flatten, load_yaml, to_yaml
from megatron_vlm.run_folder import checkpoints, complete_checkpoints

# in the summary of a run: `key_facts` of its settings, the time, and metrics of docs/reference/metrics.md
METRICS = ("model", "data", "batch", "learning rate", "time in steps", "loss", "valid_loss")
METRICS += ("lowest valid_loss", "trained_tokens", "epoch", "tokens_per_second", "mfu", "peak_memory_gb")
METRICS += ("dropped_samples",)
REFRESH = 15  # seconds after which the page of a run that goes on is loaded again
# title, unit, metrics of docs/reference/metrics.md as a pattern; each other metric gets a chart of its own
CHARTS = (
    ("Negative log-likelihood of each source", "nats per trained token", r"(valid_)?loss/.*"),
    ("Scores", "", r"(valid_)?(score|accuracy)\b.*|on_export/.*"),
    ("Rewards of DPO", "nats", r"margin|reward_(chosen|rejected)"),
    ("Rewards", "", r"(valid_)?reward|reward_std|rewards/.*/mean"),
    ("Deviation of each reward", "", r"rewards/.*/std"),
    ("Answers", "tokens", r"completions/(mean|max)_length"),
    ("Learning rate", "", r"lr(_.*)?"),
    ("Gradient norm", "before clipping", r"grad_norm"),
    ("Throughput", "tokens/s", r"tokens_per_second(_per_device)?"),
    ("Utilisation", "share of the peak", r"mfu"),
    ("Time of a step, and of it the wait for data", "s", r"seconds|data_seconds"),
    ("Memory", "GB of the fullest device", r"peak_memory_gb"),
    ("Balance of experts", "busiest over mean", r"expert_balance.*"),
)
LOSSES = {"tokens": "nats per trained token", "dpo": "DPO loss per pair"}  # units of `train.objective`
LOSSES |= {"grpo": "GRPO loss; in validation the reward, negated"}
NO_CURVE = re.compile(r"step|epoch|(valid_)?trained_tokens(/.*)?|(valid_)?samples/.*")
LAST_ANSWERS = 6  # prompts whose answers are shown
MOST_POINTS = 500  # of a curve: the lowest and the highest value of each stretch of steps

Points = list[tuple[float, float]]


def report_page(runs: Sequence[History]) -> str:
    """One HTML document without references to others. All text of the runs' files is escaped."""
    return render(
        "report/report.html",
        title=", ".join(run.name for run in runs),
        runs=runs,
        written=time.time(),
        refresh=REFRESH if any(run.running for run in runs) else None,
        figures=_summary(runs),
        charts=charts_of(runs),
        settings=_settings(runs),
        settings_title="that differ" if len(runs) > 1 else "that are not at their defaults",
        details=[_details(run) for run in runs],
        reasons=REASONS,
        time=lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)),
    )


def _summary(runs: Sequence[History]) -> list[tuple[str, list[str]]]:
    """Key settings, time, newest metrics and lowest validation loss, each with its value in every run."""
    values = []
    for run in runs:
        facts = key_facts(run.settings)
        if seconds := [row["seconds"] for row in run.rows if "seconds" in row]:
            facts["time in steps"] = str(timedelta(seconds=round(fmean(seconds) * run.step)))
        of_run = facts | {name: _number(value) for name, value in run.last.items()}
        losses = [(row["valid_loss"], row["step"]) for row in run.rows if "valid_loss" in row]
        if losses:
            loss, step = min(losses)
            of_run["lowest valid_loss"] = f"{_number(loss)} at step {step}"
        values.append(of_run)
    rows = [(name, [of_run.get(name, "") for of_run in values]) for name in METRICS]
    return [row for row in rows if any(row[1])]


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def _settings(runs: Sequence[History]) -> list[tuple[str, list[str], str]]:
    """(setting, its value in every run, its default) of the settings that differ between runs; of one run,
    from their defaults."""
    defaults = flatten(load_yaml(to_yaml(RunConfig())))
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [_in_words(run.settings.get(key)) for run in runs]
        default = _in_words(defaults.get(key))
        if len({*values, default} if len(runs) == 1 else {*values}) > 1:
            rows.append((key, values, default))
    return rows


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _details(run: History) -> dict[str, Any]:
    """The parts of the page that each run has for itself."""
    begin = "trained_tokens/"
    sources = [name.removeprefix(begin) for name in run.last if name.startswith(begin)]
    best = checkpoints(run.folder) / "best"
    exports = sorted((run.folder / "exports").glob("[!.]*"))
    return {
        "sources": [(name, run.last[begin + name], run.last.get(f"samples/{name}", 0)) for name in sources],
        "drops": read_drops(run.folder),
        "checkpoints": complete_checkpoints(run.folder),
        "best": read_text(best).strip() if best.is_file() else None,
        "exports": [path.name for path in exports],
        "answers": last_answers(run.folder, LAST_ANSWERS),
    }


# --- the charts: which metrics stand in one, and at which steps a curve is drawn ----------------------------


def charts_of(runs: Sequence[History]) -> list[dict[str, Any]]:
    """The charts of one run, or of several over each other, as data of the page's script.

    A chart has `title`, `unit`, `steps` and `series`; a series `label`, `run` (its place, which has a colour)
    and `values`, None where it has no point.
    """
    names = sorted({name for run in runs for name in run.last if not NO_CURVE.fullmatch(name)})
    groups = []
    objectives = dict.fromkeys(str(run.settings.get("train.objective", "tokens")) for run in runs)
    unit = ", ".join(LOSSES.get(name, name) for name in objectives)
    loss = ("Loss", unit, r"(valid_)?loss(/.*)?" if [*objectives] == ["tokens"] else r"(valid_)?loss")
    for title, unit, pattern in (loss, *CHARTS):
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
