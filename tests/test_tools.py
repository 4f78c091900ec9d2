import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from parity_table import BEGIN, END, replaced, table  # noqa: E402


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


def test_a_layout_is_one_line_with_the_worst_of_its_inputs():
    lines = table(
        [row("TP2", "text", 1e-6), row("TP2", "one image", 2e-5), row("PP2", "text", 3e-6)]
    ).splitlines()
    assert (
        lines[2]
        == "| gemma3 | TP2 | text, one image | 2.0e-05 | 1.0e-07 | 2.0e-05 | `parameter of one image` |"
    )
    assert len(lines) == 4


def test_a_failed_row_is_marked():
    assert "| gemma3 **failed** | TP2 |" in table([row("TP2", "text", 1.0, passed=False)])


def test_only_what_is_between_the_markers_changes():
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(readme, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="README.md: no <!-- parity:begin -->"):
        replaced("nothing here", "new")
