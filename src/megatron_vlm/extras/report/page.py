"""The page of one run, or of several beside each other."""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.extras.report.charts import charts_of
from megatron_vlm.extras.report.history import (
    History,
    best_kept,
    kept_folders,
    read_drops,
    samples_in_rows,
)
from megatron_vlm.extras.report.pages import render
from megatron_vlm.files import read_text

FIGURES = {  # in the summary of a run, by docs/metrics.md
    "loss": "{:.4f}",
    "valid_loss": "{:.4f}",
    "trained_tokens": "{:,.0f}",
    "epoch": "{:.2f}",
    "tokens_per_second": "{:,.0f}",
    "mfu": "{:.1%}",
    "peak_memory_gb": "{:.1f}",
    "dropped_samples": "{:,.0f}",
}
LAYOUT = ("tp", "pp", "vpp", "cp", "ep")
REFRESH = 15  # seconds after which the page of a run that goes on is loaded again


def report_page(runs: Sequence[History]) -> str:
    """One HTML document without references to others. All text of the runs' files is escaped."""
    charts = charts_of(runs)
    return render(
        _file("page.html"),
        {"number": number, "time": _time},
        runs=runs,
        written=time.time(),
        refresh=REFRESH if any(run.running for run in runs) else None,
        charts=charts,
        curves=[chart.data() for chart in charts],
        figures=_figures(runs),
        differences=_differences(runs),
        details=[_details(run) for run in runs],
        reasons=REASONS,
        script=_file("uplot/uPlot.iife.min.js") + _file("charts.js"),
        uplot_style=_file("uplot/uPlot.min.css"),
    )


def number(value: Any) -> str:
    """A figure in words: five digits, or nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(abs(seconds), 1 << 40)))


def _figures(runs: Sequence[History]) -> list[tuple[str, list[str]]]:
    """The newest figures, each with its value in every run, and the best of `train.best_by`."""
    rows = [
        (name, [words.format(run.last[name]) if name in run.last else "" for run in runs])
        for name, words in FIGURES.items()
    ]
    best = ["{:.4f} at step {}".format(*run.best) if run.best else "" for run in runs]
    rows.insert(2, (f"best {' or '.join(dict.fromkeys(run.best_by for run in runs))}", best))
    return [row for row in rows if any(row[1])]


def _differences(runs: Sequence[History]) -> list[tuple[str, list[str]]]:
    """The settings that the runs do not have alike, each with its value in every run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [_said(run.settings.get(key)) for run in runs]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _details(run: History) -> dict[str, Any]:
    """The parts of the page that each run has for itself."""
    saved, exported = kept_folders(run.folder)
    return {
        "settings": [(key, _said(value), _said(default)) for key, value, default in run.differing()],
        "layout": [f"{name} {run.settings.get(f'parallel.{name}', 1)}" for name in LAYOUT],
        "commands": commands(run, bool(saved)),
        "drops": read_drops(run.folder),
        "samples_in_rows": sorted(samples_in_rows(run.folder).items()),
        "sources": _sources(run),
        "checkpoints": saved,
        "best": best_kept(run.folder),
        "exports": exported,
    }


def _sources(run: History) -> list[tuple[str, float, float, float]]:
    """(source, trained tokens, their share, samples) of each source since the run began."""
    begin = "trained_tokens/"
    tokens = {name.removeprefix(begin): value for name, value in run.last.items() if name.startswith(begin)}
    total = sum(tokens.values()) or 1
    return [
        (name, value, value / total, run.last.get(f"samples/{name}", 0)) for name, value in tokens.items()
    ]


def commands(run: History, saved: bool) -> list[tuple[str, str]]:
    """(what for, command line) of what may be done with the run now, ready for a shell."""
    folder = str(run.folder)
    processes = run.starts[-1].get("processes", 1) if run.starts else 1
    many = ["--nproc", str(processes)] if processes != 1 else []
    lines = [("go on", ["train", "--config", f"{folder}/config.yaml", *many])]
    if saved:
        lines += [
            ("export", ["export", folder, f"{folder}-hf"]),
            ("compare the export with the run", ["verify", folder, f"{folder}-hf"]),
            ("ask it", ["generate", folder, "<image> What is this?", "--image", "photo.jpg"]),
        ]
    if run.step:
        shown = ["--step", str(run.step), "--output", "step.html"]
        lines.append(("see the samples of the last step", ["replay", folder, *shown]))
    return [(what, f"megatron-vlm {shlex.join(words)}") for what, words in lines]


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _file(name: str) -> str:
    return read_text(Path(__file__).parent / name)
