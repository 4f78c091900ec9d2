"""A check of a card writes the README and docs/reference/gpu.md; one place says what did not run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from places import ROOT

import tables
from gpu_check import rows, runner
from gpu_check.parts import LEVELS, PARTS
from gpu_check.record import REPORT, record
from gpu_check.rows import Row

PAGES = ("README.md", "docs/reference/gpu.md")
CARD = "1 x NVIDIA H100 80GB HBM3"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with the pages and a report without any part."""
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / REPORT).parent.mkdir()
    (tmp_path / REPORT).write_text('{"parts": {}}')
    return tmp_path


def checked(folder: Path, date: str, card: str = CARD) -> Path:
    """A folder with the table of a check whose `fused` is wrong."""
    folder.mkdir()
    for what, value in {"card": card, "torch": "2.11.0+cu130", "driver": "580.95"}.items():
        rows.add(folder, Row("environment", what, value))
    rows.add(folder, Row("attention", "flash", 0.01, 0.02))
    rows.add(folder, Row("fused", "gate | norm", 0.5, 0.02))
    rows.add(folder, Row("ranks", "there is one GPU", "left out"))
    rows.add(folder, Row("ranks", "the whole part, seconds, of 150 at most", 3.0))
    rows.write_tables(folder, {"date": date}, list(PARTS))
    return folder


def region(page: Path, name: str) -> str:
    return page.read_text().partition(f"<!-- {name}:begin -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]


def test_without_a_check_of_a_card_the_box_says_so_once():
    box = tables.gpu_box({"parts": {}})
    assert box.count("No run on a GPU is recorded") == 1
    assert box.count("not run yet") == len(LEVELS) == 5
    assert 5 <= len(box.splitlines()) <= 8
    assert {part.level for part in PARTS.values()} == {*LEVELS, None}


def test_a_check_of_a_card_writes_the_box_and_the_matrix(checkout):
    first = checked(checkout / "first", "2026-12-01 10:00")
    assert record(first, root=checkout).startswith("recorded in reports/gpu.json")
    lines = region(checkout / "README.md", "gpu_box").splitlines()
    assert "No run on a GPU" not in lines[0]
    place = f"2026-12-01, {CARD}, torch 2.11.0+cu130, driver 580.95"
    assert lines[2].endswith(f": {place}, 1 of 1 parts")
    assert lines[3].endswith(f": {place}, 2 of 7 parts; **wrong values** in `fused`")
    assert [line.endswith(": not run yet") for line in lines[4:]] == [True] * 3  # ranks were left out
    matrix = region(checkout / "docs/reference/gpu.md", "gpu").splitlines()
    assert f"| kernels | `fused` | {place} | 1 | gate / norm |" in matrix
    assert f"| kernels | `attention` | {place} | 1 | none |" in matrix
    assert len(matrix) == 2 + sum(part.level is not None for part in PARTS.values())


def test_parts_that_ran_later_replace_what_was_recorded_of_them(checkout):
    record(checked(checkout / "first", "2026-12-01 10:00"), root=checkout)
    record(checked(checkout / "second", "2026-12-02 10:00"), ["attention"], checkout)
    parts = json.loads((checkout / REPORT).read_text())["parts"]
    dates = {name: part["about"]["date"][:10] for name, part in parts.items()}
    assert dates == {"environment": "2026-12-01", "attention": "2026-12-02", "fused": "2026-12-01"}
    kernels = region(checkout / "README.md", "gpu_box").splitlines()[3]
    assert kernels.index("2026-12-02") < kernels.index("2026-12-01")


def test_the_report_has_no_log_of_a_part_that_failed(checkout):
    folder = checked(checkout / "first", "2026-12-01 10:00")
    problem = runner.run_apart("no_such_part", folder, [], 60)  # its log ends with what argparse says
    rows.add(folder, Row("fused", problem, "FAILED", wrong=True))
    rows.write_tables(folder, {"date": "2026-12-01 10:00"}, list(PARTS))
    assert "invalid choice" in (folder / "gpu_check.md").read_text()
    record(folder, root=checkout)
    report = json.loads((checkout / REPORT).read_text())["parts"]["fused"]["rows"]
    assert report[-1]["what"] == "ended with code 2; no_such_part.log"


def test_a_check_on_a_cpu_or_in_a_bundle_records_nothing(checkout):
    before = {name: (checkout / name).read_text() for name in (*PAGES, REPORT)}
    folder = checked(checkout / "cpu", "2026-12-01 10:00", "none: CPU, x86_64")
    assert record(folder, root=checkout).startswith("not recorded")
    assert before == {name: (checkout / name).read_text() for name in before}
    folder = checked(checkout / "card", "2026-12-01 10:00")
    assert f"--record {folder}" in record(folder, root=checkout / "bundle")


NOT_RUN = re.compile(
    r"\b(not|none|nothing|never|untested)\b(?:(?!\bif\b)[^.:;|]){0,60}\b(run|ran|measured|compared|seen|made|tried|recorded)\b"
    r"[^.:;|]{0,30}\b(GPUs?|cards?|CUDA|NCCL|yet)\b",
    re.IGNORECASE,
)


def test_one_place_alone_says_that_nothing_ran_on_a_gpu():
    """It is written from reports/gpu.json, so that it ends with the first run there."""
    found = []
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").glob("*.md")]
    for page in [*pages, *(ROOT / "src").rglob("*.py")]:
        text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", page.read_text(), flags=re.DOTALL)
        found += [f"{page.name}: {match[0]}" for match in NOT_RUN.finditer(" ".join(text.split()))]
    assert found == []
