import os
import subprocess
import sys

import pytest
from programs import ROOT

from tables import REPORTS, TABLES, replaced


def test_every_report_has_its_table_in_its_page():
    reports = {report for report, _, _ in TABLES.values() if report}
    assert reports == {file.name for file in REPORTS.glob("*.json")}
    for name, (_, page, _) in TABLES.items():
        assert replaced(page.read_text(encoding="utf-8"), "", name)


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


@pytest.mark.soak
def test_every_measuring_tool_starts_as_it_is_typed():
    """Without the paths that these tests add; all in one process, as the imports take long."""
    tools = [str(file) for file in [*(ROOT / "tools").glob("bench_*.py"), ROOT / "tools/gpu_check"]]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", HELP, *tools]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("usage: ") == len(tools) > 5
