"""What the check of a GPU writes: marks of what was not expected, a layer out of two depths, clocks, and
sizes of a process that sees no card."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from gpu_check import clock, depths, rows, sizes
from gpu_check.depths import Timed
from gpu_check.rows import Row
from gpu_check.stack import PUBLISHED, Case

CASE = Case(1024, (2, 4))


def test_a_value_that_is_off_by_more_than_a_third_is_marked(tmp_path):
    values = {"near": 1.3, "over": 1.4, "under": 0.6, "nan": float("nan")}
    for what, value in values.items():
        rows.add(tmp_path, Row("step", what, value, expected=1.0))
    rows.add(tmp_path, Row("step", "a word", "out of memory", expected=1.0))
    rows.add(tmp_path, Row("expected", "near", 1.0))
    rows.write_tables(tmp_path, {"date": "2026"}, ["step", "expected"])
    table = (tmp_path / "gpu_check.md").read_text()
    cells = {line.split(" | ")[1]: line.split(" | ")[3] for line in table.splitlines() if "| step" in line}
    assert cells == {
        "near": "1",
        "over": "1 OFF: 1.4 times",
        "under": "1 OFF: 0.6 times",
        "nan": "1 OFF: nan times",
        "a word": "",
    }
    assert "\n| expected |" not in table
    listed = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert [row["expected"] for row in listed if row["part"] == "step"] == [1.0] * 5


def test_one_layer_is_the_difference_of_two_depths_without_what_is_around_layers():
    def timed(layers: int) -> Timed:
        return Timed(layers, 0.5 + 0.02 * layers, 0.3, 0.01 + 0.001 * layers, 7e12 + 1e12 * layers)

    found = {row.what: row.value for row in depths.one_layer(CASE, timed(4), timed(2), 100e12)}
    assert PUBLISHED == 36
    assert found == pytest.approx(
        {
            "1024 tokens, one layer, milliseconds": 20,
            "1024 tokens, one layer, model TFLOP/s": 50,
            "1024 tokens, one layer, MFU": 0.5,
            "1024 tokens, micro batch without layers, milliseconds": 500,
            "1024 tokens, all 36 layers by these, micro batch, milliseconds": 500 + 36 * 20,
            "1024 tokens, all 36 layers by these, micro batch, MFU": 43 / (0.5 + 36 * 0.02) / 100,
            "decoding, one layer, milliseconds a token": 1,
            "decoding, all 36 layers by these, milliseconds a token": 10 + 36,
        }
    )


def test_measured_reserve_stands_beside_the_plans():
    gib = 2**30
    context, fragments, reserve = depths.memory_rows("1024 tokens", (50 * gib, 47 * gib, 40 * gib))
    assert [context.value, fragments.value, reserve.value, reserve.expected] == [3, 7, 10, 4]
    assert "OFF: 2.5 times" in reserve.shown_expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1980, 1980, 645.32, 700.00, 51", [1980.0, 1980.0, 645.32, 700.0, 51.0]),
        ("1980, 1980, [N/A], 700.00, 51", [1980.0, 1980.0, "[N/A]", 700.0, 51.0]),
        ('Field "power.draw" is not a valid field', ['not known: Field "power.draw" is not a valid field']),
        ("", ["not known: nvidia-smi says nothing"]),
    ],
)
def test_clocks_and_power_are_asked_for_while_the_card_works(answer, expected):
    calls = []
    program = [sys.executable, "-c", f"import time; time.sleep(0.2); print({answer!r})"]
    assert list(clock.asked_during(lambda: calls.append(1), program).values()) == expected
    assert calls


def test_a_machine_without_nvidia_smi_says_so(tmp_path):
    (text,) = clock.asked_during(lambda: None, [str(tmp_path / "nvidia-smi")]).values()
    assert text.startswith("not known: ")


HIDES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from gpu_check import runner
if "GPU_CHECK_CARD" not in os.environ:
    runner.hide_card("NVIDIA H100 80GB HBM3")
print(sys.argv[2], os.environ["GPU_CHECK_CARD"], repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""


def test_a_part_that_hides_the_card_has_the_sizes_of_a_card(tmp_path, monkeypatch):
    script = tmp_path / "hides.py"
    script.write_text(HIDES)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, str(script), str(ROOT / "tools"), "word"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert done.stdout == "word NVIDIA H100 80GB HBM3 ''\n"
    monkeypatch.delenv(sizes.CARD, raising=False)
    assert sizes.sizes().rows == (1024,)
    monkeypatch.setenv(sizes.CARD, "NVIDIA H100 80GB HBM3")
    assert sizes.sizes().rows == (8192, 32_768)
