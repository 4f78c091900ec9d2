import os
import subprocess
import sys

import pytest
from programs import ROOT

from tables import REPORTS, TABLES, data, parity, replaced


def row(layout: str, kind: str, logits: float, passed: bool = True) -> dict:
    return {
        "family": "gemma3",
        "layout": layout,
        "input": kind,
        "max_abs_logits": logits,
        "abs_loss": 1e-7,
        "max_rel_grad": logits,
        "worst_parameter": f"parameter of {kind}",
        "passed": passed,
    }


def test_parity_is_the_worst_of_each_family_and_of_each_of_its_layouts():
    rows = [row("TP2", "text", 1e-6), row("TP2", "one image", 2e-5), row("PP2", "text", 3e-6)]
    lines = parity([*rows, row("EP2", "text", 4e-6) | {"family": "glm4v_moe"}]).splitlines()
    assert lines[2:4] == [
        "| gemma3 | 2.0e-05 | 1.0e-07 | 2.0e-05 |",
        "| glm4v_moe | 4.0e-06 | 1.0e-07 | 4.0e-06 |",
    ]
    assert "text; one image." in lines[5]
    assert lines[-3:] == ["| TP2 | 2.0e-05 |  |", "| PP2 | 3.0e-06 |  |", "| EP2 |  | 4.0e-06 |"]


def test_a_failed_row_is_marked():
    table = parity([row("TP2", "text", 1.0, passed=False)])
    assert "| gemma3 | 1.0e+00 **failed** |" in table and "| TP2 | 1.0e+00 **failed** |" in table


def test_data_is_shown_over_the_floor_and_over_the_floor_with_text_where_measured():
    rows = [
        {
            "path": path,
            "samples_per_second": rate,
            "ratio_to_floor": rate / 800,
            "ratio_to_floor_and_text": rate / 500,
        }
        | {"family": "gemma3", "image": "448x448", "turns": 8}
        for path, rate in {"floor": 800, "floor_and_text": 500, "megatron_vlm": 400}.items()
    ]
    report = {"rows": rows, "versions": {}, "workers": {"scaling": 1.8}, "date": "2026-11-21"}
    assert data(report).splitlines()[2] == "| gemma3 | 448x448 | 8 | 800 | 0.62 | 0.50 | 0.80 |"
    report["rows"] = [rows[0], rows[2]]
    assert data(report).splitlines()[2] == "| gemma3 | 448x448 | 8 | 800 | 0.50 |"


def test_every_report_has_its_table_in_its_page():
    assert {report for report, _, _ in TABLES.values()} == {file.name for file in REPORTS.glob("*.json")}
    for name, (_, page, _) in TABLES.items():
        assert replaced(page.read_text(encoding="utf-8"), "", name)


def test_only_what_is_between_the_marks_changes():
    page = "before\n<!-- plan:begin -->\nold\n<!-- plan:end -->\nafter\n"
    assert replaced(page, "new", "plan") == page.replace("old", "new")


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="no <!-- parity:begin -->"):
        replaced("nothing here", "new", "parity")


HELP = """
import runpy, sys
found = sys.path[1:]
for tool in sys.argv[1:]:
    sys.path[:], sys.argv = [tool.rpartition("/")[0], *found], [tool, "--help"]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, tool
    for name in ("parity", "bench_step"):  # which lie beside tools and tests
        sys.modules.pop(name, None)
"""


@pytest.mark.long
def test_every_measuring_tool_starts_as_it_is_typed():
    """Without the paths that these tests add; all in one process, as the imports take long."""
    tools = [str(file) for file in [*(ROOT / "tools").glob("bench_*.py"), ROOT / "tools/gpu_check"]]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", HELP, *tools]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("usage: ") == len(tools) > 5
