"""What `report` and `runs` say of run folders, and the page in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from browser import BROWSER, browser
from megatron_vlm.cli import app
from megatron_vlm.config import RunConfig
from megatron_vlm.extras.report.charts import thinned
from megatron_vlm.extras.report.history import last_words, read_history
from megatron_vlm.extras.report.live import open_log
from megatron_vlm.extras.report.page import report_page
from megatron_vlm.files import read_rows
from megatron_vlm.job.errors import closing
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.run_folder import lock
from megatron_vlm.run_folder.folder import begin, complete
from megatron_vlm.run_folder.run_log import draw_losses

SAID = "document.querySelector('output').textContent"
ATTACK = "</script><script>document.title = 'run'</script>"


def config(folder, **settings) -> RunConfig:
    plain = {"name": "a", "run_dir": str(folder), "logging.tensorboard": False, "train.steps": 6}
    return apply_overrides(RunConfig(), plain | settings)


def logged(folder, steps=6, **settings):
    """A run of so many of its six steps, whose data and name hold HTML; its fourth loss is NaN."""
    log = open_log(config(folder, **settings), 6, 1, True, {}, ())
    for step in range(1, steps + 1):
        figures = {"padding": 0.25, "trained_tokens/b": 3, "trained_tokens/" + ATTACK: 1, "own/figure": step}
        loss = float("nan") if step == 4 else 2 / step
        log.log_step(step, loss, 1e-5 / step, 1.0, 10, 0.5, dropped=1, figures=figures)
        if step == 3:
            log.log_eval(step, 0.75)
    (folder / "drops").mkdir(exist_ok=True)
    drops = [{"key": ATTACK, "reason": "over_length", "detail": "63 tokens"}] * 5
    (folder / "drops/rank0.jsonl").write_text("".join(json.dumps(drop) + "\n" for drop in drops))
    return log


@pytest.fixture
def finished(tmp_path):
    logged(tmp_path / "runs/done", name=ATTACK).close()
    return tmp_path / "runs/done"


def table_of(page: str, title: str) -> str:
    """The text of the table behind a chart."""
    (figure,) = [part for part in page.split("<figure>") if f"<b>{title}</b>" in part]
    return " ".join(re.sub(r"<[^>]+>", " ", figure.split("<details>")[1].split("</details>")[0]).split())


def test_a_finished_run_leaves_a_page_with_its_figures_and_nothing_from_elsewhere(finished):
    page = (finished / "report.html").read_text()
    assert table_of(page, "Loss") == "values step loss valid_loss 1 2 2 1 3 0.66667 0.75 5 0.4 6 0.33333"
    assert table_of(page, "own/figure").endswith("6 6")
    page = report_page([read_history(finished)])
    assert ">finished</span>" in page and "6 of 6" in page and "0.7500 at step 3" in page
    assert 'http-equiv="refresh"' not in page and not re.search(r"(src|href)=", page)
    assert ATTACK not in page and html.escape(ATTACK) in page.replace("&#39;", "&#x27;")
    assert "<td>over_length</td><td>5</td>" in page and "raise data.seq_length" in page
    assert "<td>18</td>\n<td>75.0%</td>" in page  # of the tokens of two sources
    (start,) = read_rows(finished / "starts.jsonl")
    assert start["total_steps"] == 6 and start["versions"]["torch"] in page
    assert f"megatron-vlm train --config {finished}/config.yaml</pre>" in page
    assert f"megatron-vlm replay {finished} --step 6 --output step.html</pre>" in page
    assert "<tr><th>train.steps</th><td>6</td><td>1000</td></tr>" in page


def test_while_it_goes_on_the_page_is_loaded_again(tmp_path):
    log = logged(tmp_path / "run", steps=2)
    page = (tmp_path / "run/report.html").read_text()
    assert 'http-equiv="refresh"' in page and ">running</span>" in page
    log.close()


def test_a_run_that_fails_says_why_on_its_page(tmp_path):
    with pytest.raises(ZeroDivisionError), closing(logged(tmp_path / "run", steps=2)):
        raise ZeroDivisionError("division by zero")
    page = (tmp_path / "run/report.html").read_text()
    assert ">died</span>\n ZeroDivisionError: division by zero" in page


def test_the_last_words_are_whole_and_without_our_names(tmp_path):
    error = "Traceback:\n  File x, line 1\nmegatron_vlm.config.ConfigError: too many:\n  mend it."
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors/rank0.txt").write_text(error)
    assert last_words(tmp_path) == "too many: mend it."


def test_the_page_can_be_left_out(tmp_path):
    logged(tmp_path / "run", **{"logging.report": False}).close()
    assert not (tmp_path / "run/report.html").exists()


def test_two_runs_are_drawn_over_each_other_with_what_differs(tmp_path, finished):
    logged(tmp_path / "runs/b", **{"optimizer.lr": 3e-5}).close()
    out = tmp_path / "two.html"
    result = CliRunner().invoke(
        app, ["report", str(finished), str(tmp_path / "runs/b"), "--output", str(out)]
    )
    assert result.exit_code == 0, result.output
    page = out.read_text()
    rows = re.findall(r'<tr class="differs"><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>', page)
    assert [row[0] for row in rows] == ["name", "run_dir", "optimizer.lr"]
    assert rows[2][1:] == ("1e-05", "3e-05")
    assert "step done · loss done · valid_loss b · loss b · valid_loss 1 2 2" in table_of(page, "Loss")


def test_a_spike_stays_in_a_long_curve():
    points = [(step, 1.0) for step in range(10_000)]
    points[7777] = (7777, 50.0)
    kept = thinned(points)
    assert len(kept) <= 500 and (7777, 50.0) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]


HOLDS = (
    "import sys, time; from megatron_vlm.run_folder import lock; held = lock.take(sys.argv[1]); "
    "print(1, flush=True); time.sleep(60)"
)


def test_the_runs_of_a_folder_with_their_states(tmp_path, finished):
    """One finished, one that a process holds, one that stopped, one that died with and one without a word,
    one damaged."""
    runs = tmp_path / "runs"
    for name in ("alive", "asked", "failed", "deep/killed", "broken", "cut"):
        logged(runs / name, steps=2).close()
    (runs / "failed/errors").mkdir()
    error = 'Traceback (most recent call last):\n  File "x"\nValueError: no \x1b[31mroom\n'
    (runs / "failed/errors/rank1.txt").write_text(error)
    complete(begin(runs / "asked", 2), {"files": {}})
    (runs / "broken/metrics.jsonl").write_text("garbage\n")
    (runs / "cut/checkpoints").symlink_to("checkpoints")  # to itself
    (runs / "notes").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(runs / "alive")], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        said = listed(runs)
        (alive,) = listed(runs, "--state", "running")[1:]
        assert alive.split() == next(line for line in said if "alive" in line).split()
    finally:
        holder.kill()
        holder.wait()
    by_name = {line.split()[0].removeprefix(f"{runs}/"): line for line in said[1:]}
    assert set(by_name) == {"alive", "failed", "asked", "deep/killed", "broken", "cut", "done"}
    assert " running " in by_name["alive"] and " 2/6 " in by_name["alive"]
    assert " stopped " in by_name["asked"] and " 2/6 " in by_name["asked"]
    assert " finished " in by_name["done"] and "0.7500 at step 3" in by_name["done"]
    assert by_name["failed"].endswith("ValueError: no \\x1b[31mroom") and " died " in by_name["failed"]
    assert by_name["deep/killed"].endswith("no last word: killed or interrupted after step 2")
    assert " damaged " in by_name["broken"] and "metrics.jsonl: line 1" in by_name["broken"]
    assert " damaged " in by_name["cut"] and "checkpoints is not a folder" in by_name["cut"]
    assert not lock.is_held(runs / "alive")
    for place, name in enumerate(("failed", "done", "deep/killed", "alive", "asked")):
        os.utime(runs / name / "metrics.jsonl", (0, 1000 - place))
    order = [line.split()[0].removeprefix(f"{runs}/") for line in listed(runs, "--sort", "when")[1:]]
    assert order == ["failed", "done", "deep/killed", "alive", "asked", "broken", "cut"]


def listed(folder, *arguments) -> list[str]:
    result = CliRunner().invoke(app, ["runs", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_folder_with_numbers_and_types_that_no_run_writes_still_has_a_page(tmp_path, finished):
    rows = ['{"step": 7, "loss": "x"}', f'{{"step": 8, "loss": {10**400}}}', '{"step": 9, "loss": [1, 2]}']
    with (finished / "metrics.jsonl").open("a") as file:
        file.writelines(f"{row}\n" for row in rows)
    (finished / "starts.jsonl").write_text('{"step": 1, "time": -1e98, "versions": []}\n')
    with (finished / "config.yaml").open("a") as file:
        file.write('own: "\\ud800"\n')  # which UTF-8 has no bytes for
    (finished / "batches").mkdir()
    (finished / "batches/rank0.jsonl").write_text('{"keys": 5}\n{"keys": true}\n{"keys": [["a"], 3]}\n')
    draw_losses(finished / "metrics.jsonl", tmp_path / "loss.png")
    result = CliRunner().invoke(app, ["report", str(finished)])
    assert result.exit_code == 0 and (tmp_path / "loss.png").exists(), result.exception


def test_what_is_no_run_is_said(tmp_path):
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nothere")])
    assert "holds no run" in str(missing.exception)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "holds no run" in str(result.exception)
    assert listed(tmp_path) == [f"no runs in {tmp_path}"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(finished):
    (finished / "report.html").write_text(report_page([read_history(finished)]), encoding="utf-8")
    with browser() as page:
        for width in (1280, 400):
            page.open((finished / "report.html").as_uri(), width=width, dark=width == 400)
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            assert page.run("document.title") == ATTACK  # no record ran a script
            drawn = "[...document.querySelectorAll('figure canvas')].every(one => one.width > 100)"
            assert page.run(drawn)
        for _ in range(3):  # the wide tables above can be chosen, too
            if page.run("document.activeElement.className") != "plot":
                page.press("Tab")
        assert page.run("document.activeElement.className") == "plot"
        page.press("Home")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert (
            page.run("document.querySelector('output').textContent")
            == "step 3: loss 0.66667, valid_loss 0.75"
        )
        page.press("End")
        assert page.run(SAID).startswith("step 6: loss 0.33333")
        assert page.complaints == []


def test_following_writes_the_page_until_the_run_ends(tmp_path):
    logged(tmp_path / "run", steps=2).close()
    code = HOLDS.replace("sleep(60)", "sleep(1.2)")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE)
    holder.stdout.readline()
    began = time.monotonic()
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--follow", "--every", "1"])
    holder.wait()
    assert 1 <= result.output.count("wrote") - 1 <= 3 and time.monotonic() - began < 30
    assert ">died</span>" in (tmp_path / "run/report.html").read_text()
