"""Batches, gradients, checkpoints, exports and adapters are bit for bit those of tests/golden.json.

`python tools/golden.py --check` compares the same outside pytest; without `--check` it writes them again.
"""

import json

import pytest

import golden


def test_one_rank_is_unchanged(tmp_path):
    cells = golden.measured(["gemma3"], ["1 rank", "packed"], tmp_path)
    assert golden.differences(cells) == []


@pytest.mark.long
def test_all_families_and_layouts_are_unchanged(tmp_path):
    cells = golden.measured(golden.FAMILIES, golden.LAYOUTS, tmp_path)
    assert cells.keys() == json.loads(golden.FILE.read_text())["cells"].keys()
    assert golden.differences(cells) == []
