"""The page of one run, or of several over each other."""

import json
import time
from collections.abc import Sequence
from typing import Any

from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.extras.pages import render
from megatron_vlm.extras.report.charts import charts_of
from megatron_vlm.extras.report.history import History, read_drops
from megatron_vlm.files import read_text
from megatron_vlm.overrides import flatten, load_yaml, to_yaml
from megatron_vlm.run_folder import checkpoints, complete_checkpoints

METRICS = ("loss", "valid_loss", "lowest valid_loss", "trained_tokens", "epoch", "tokens_per_second", "mfu")
METRICS += ("peak_memory_gb", "dropped_samples")  # in the summary of a run, by docs/metrics.md
REFRESH = 15  # seconds after which the page of a run that goes on is loaded again


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
    """The newest metrics, and the lowest validation loss, each with its value in every run."""
    values = []
    for run in runs:
        of_run = {name: _number(value) for name, value in run.last.items()}
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
    }
