"""What a stranger has to open to follow a run, as `tools/walks.py` counts it: a figure may only fall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "walks.json"


@pytest.mark.long
def test_no_walk_becomes_longer(tmp_path):
    """`python tools/walks.py --write` records the figures; `--files` prints what is opened."""
    recorded = json.loads(RECORDED.read_text())
    code = "import json, walks; walks.main(); print(json.dumps(walks.figures))"
    tools = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", tools], check=True, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted.keys() == recorded.keys()
    longer = {
        f"{walk}: {name}": (recorded[walk][name], number)
        for walk, numbers in counted.items()
        for name, number in numbers.items()
        if number > recorded[walk][name]
    }
    assert longer == {}
