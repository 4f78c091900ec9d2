"""What `report` says of run folders, and the page in a real browser."""

from __future__ import annotations

import html
import json
import re

import pytest
from logged_runs import begun_run, log_step, validate
from typer.testing import CliRunner

from megatron_vlm.callbacks.run_log import read_rows
from megatron_vlm.cli import app
from megatron_vlm.config import RunConfig
from megatron_vlm.extras.report.history import History, read_history
from megatron_vlm.extras.report.live import LivePage
from megatron_vlm.extras.report.page import LOSSES, charts_of, report_page
from megatron_vlm.objectives import OBJECTIVES
from megatron_vlm.overrides import apply_overrides

ATTACK = "</script><script>document.title = 'run'</script>"


def config(folder, **settings) -> RunConfig:
    plain = {"name": "a", "run_dir": str(folder), "logging.tensorboard": False, "train.steps": 6}
    return apply_overrides(RunConfig(), plain | settings)


def logged(folder, steps=6, **settings):
    """A run of so many of its six steps, whose data and name hold HTML; its fourth loss is NaN."""
    run = begun_run(config(folder, **settings), 6, LivePage())
    for step in range(1, steps + 1):
        figures = {"padding": 0.25, "trained_tokens/b": 3, "trained_tokens/" + ATTACK: 1, "own/figure": step}
        loss = float("nan") if step == 4 else 2 / step
        log_step(run, loss, dropped=1, lr=1e-5 / step, grad_norm=1.0, **figures)
        if step == 3:
            validate(run, 0.75)
    (folder / "drops").mkdir(exist_ok=True)
    drops = [{"key": ATTACK, "reason": "over_length", "detail": "63 tokens"}] * 5
    (folder / "drops/rank0.jsonl").write_text("".join(json.dumps(drop) + "\n" for drop in drops))
    return run.callbacks


@pytest.fixture
def finished(tmp_path):
    logged(tmp_path / "runs/done", name=ATTACK).close()
    return tmp_path / "runs/done"


def curves_of(page: str, title: str) -> dict[str, list]:
    """The steps and the curves of a chart."""
    (charts,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page)
    (chart,) = [chart for chart in json.loads(charts) if chart["title"] == title]
    return {"steps": chart["steps"]} | {series["label"]: series["values"] for series in chart["series"]}


def test_a_finished_run_leaves_a_page_with_its_figures_and_nothing_from_elsewhere(finished):
    page = (finished / "report.html").read_text()
    assert curves_of(page, "Loss") == {
        "steps": [1, 2, 3, 5, 6],
        "loss": [2, 1, 2 / 3, 0.4, 1 / 3],
        "valid_loss": [None, None, 0.75, None, None],
    }
    assert curves_of(page, "own/figure")["own/figure"][-1] == 6
    page = report_page([read_history(finished)])
    assert ">finished</span>" in page and "6 of 6" in page and "0.75 at step 3" in page
    assert 'http-equiv="refresh"' not in page and not re.search(r"(src|href)=", page)
    assert ATTACK not in page and html.escape(ATTACK) in page.replace("&#39;", "&#x27;")
    assert "<td>over_length</td><td>5</td>" in page and "raise data.seq_length" in page
    assert "<tr><td>b</td><td>18</td><td>0</td></tr>" in page
    (start,) = read_rows(finished / "starts.jsonl")
    assert start["total_steps"] == 6 and start["versions"]["torch"] in page
    assert "<tr><th>train.steps</th><td>6</td><td>1000</td></tr>" in page


@pytest.mark.parametrize(
    ("objectives", "unit"),
    [
        (["tokens"], "nats per trained token"),
        (["dpo"], "DPO loss per pair"),
        (["grpo"], "GRPO loss; in validation the reward, negated"),
        (["own.py:focal"], "own.py:focal"),
        (["tokens", "dpo"], "nats per trained token, DPO loss per pair"),
    ],
)
def test_the_loss_has_the_unit_of_its_objective(tmp_path, objectives, unit):
    rows = [{"step": 1, "loss": 0.7, "valid_loss": 0.6, "loss/a": 2.0}]
    runs = [
        History(tmp_path / name, {"train.objective": name}, starts=[], rows=rows, running=False)
        for name in objectives
    ]
    charts = {chart["title"]: (chart["unit"], len(chart["series"])) for chart in charts_of(runs)}
    if objectives == ["tokens"]:
        assert charts == {"Loss": (unit, 3)}
    else:
        of_sources = ("nats per trained token", len(runs))
        assert charts == {"Loss": (unit, 2 * len(runs)), "Negative log-likelihood of each source": of_sources}


def test_every_objective_has_a_unit():
    assert LOSSES.keys() == OBJECTIVES.keys()


def test_two_runs_are_drawn_over_each_other_with_what_differs(tmp_path, finished):
    logged(tmp_path / "runs/b", **{"optimizer.lr": 3e-5}).close()
    out = tmp_path / "two.html"
    result = CliRunner().invoke(
        app, ["report", str(finished), str(tmp_path / "runs/b"), "--output", str(out)]
    )
    assert result.exit_code == 0, result.output
    page = out.read_text()
    rows = re.findall(r"<tr><th>(\S+)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    assert [row[0] for row in rows] == ["name", "run_dir", "optimizer.lr"]
    assert rows[2][1:] == ("1e-05", "3e-05", "1e-05")
    names = ["steps", "done · loss", "done · valid_loss", "b · loss", "b · valid_loss"]
    assert list(curves_of(page, "Loss")) == names
