"""The notebook of the tutorial, run from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import run_program

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"
RESULTS = "\nprint(json.dumps([scores, answer, answer_of_transformers]))"


@pytest.mark.long
def test_the_tutorial_makes_a_model_that_answers_in_transformers(tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "tutorial.py").write_text("\n".join(code) + RESULTS)
    ran = run_program(tmp_path / "tutorial.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    scores, answer, of_transformers = json.loads(ran.stdout.splitlines()[-1])
    assert scores["exact_match"] >= 0.75
    assert answer == of_transformers
    assert answer in [f"The square is {color}." for color in ("red", "green", "blue", "yellow")]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * len(code)
