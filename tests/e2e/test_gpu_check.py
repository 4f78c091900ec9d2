"""The check of a GPU runs on a CPU, a part that ends badly is a row, and it imports no readers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from programs import ROOT, run_program

from gpu_check import rows, runner
from gpu_check.expected import seconds_of_documents
from gpu_check.parts import MINUTES, PARTS
from gpu_check.rows import Row
from gpu_check.sizes import described, documents_of
from gpu_check.stack import MODEL, run_config
from megatron_vlm.extras.plan.plan import make_plan

TOOL = ROOT / "tools/gpu_check"
SOAK = {"bf16", "ranks", "save", "generate", "offload", "transformers", "expected", "profile"}
LONG = {"parity", "step", "run"}
CARD = "NVIDIA H100 80GB HBM3"
COUNTS = {  # rows, at least
    "environment": 12,
    "attention": 20,
    "fused": 15,
    "run": 10,
    "delta_nets": 5,
    "grouped": 4,
    "patches": 4,
    "expected": 14,
    "step": 30,
    "transformers": 6,
    "profile": 5,
    "head": 3,
    "experts": 3,
    "parity": 6,
    "bf16": 4,
    "save": 4,
    "generate": 2,
    "offload": 2,
    "ranks": 20,
}


CELLS = [
    pytest.param(part, marks=[pytest.mark.long] * (part in LONG) + [pytest.mark.soak] * (part in SOAK))
    for part in PARTS
]


@pytest.mark.parametrize("part", CELLS)
def test_every_part_runs_on_a_cpu(part, tmp_path):
    """So that nothing but the GPU is new to it there."""
    # of parts that come before
    rows.add(tmp_path, Row("expected", "decoding, one layer, milliseconds a token", 3.0))
    rows.add(tmp_path, Row("step", "1024 tokens, seconds", 2.0))
    words = ("--only", part, "--out", tmp_path, "--families", "gemma3")
    done = run_program(TOOL, *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [row for row in rows.read(tmp_path) if row.part == part]
    assert len(found) >= COUNTS[part], found
    assert [str(row) for row in found if row.verdict == "WRONG"] == []
    if part == "transformers":
        assert any("over" in row.what and row.value > 0 for row in found)
    if part == "step":
        assert [row.expected for row in found if row.what.startswith("decoding, one layer")] == [3.0]
    if part == "ranks":
        for layout in ("TP2+SP,", "TP2+SP overlapped,", "TP2+SP overlapped, bf16"):
            assert any(layout in row.what for row in found), layout


@pytest.mark.soak
def test_what_is_expected_of_a_card_is_computed_without_one(tmp_path):
    """A layer of 193 M weights and 8,192 tokens: 15 to 19 ms."""
    words = ("--only", "expected", "--out", tmp_path)
    done = run_program(TOOL, *words, CUDA_VISIBLE_DEVICES="", GPU_CHECK_CARD=CARD)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row.what: row.value for row in rows.read(tmp_path)}
    assert 15 < found["8192 tokens, one layer, milliseconds"] < 19
    full = found["8192 tokens, model.recompute=full, 4 layers, one layer, milliseconds"]
    assert 1.3 < full / found["8192 tokens, one layer, milliseconds"] < 1.4
    assert 50 < found["8192 tokens, peak GiB"] < 65
    plan = make_plan(run_config(8192, "bf16"), described(MODEL, {}), 1)  # of all 36 layers
    seconds = seconds_of_documents(plan, documents_of(8192))
    by_depths = found["8192 tokens, all 36 layers by these, micro batch, milliseconds"]
    assert by_depths == pytest.approx(1000 * seconds, rel=0.01)


def test_limits_add_up_to_half_an_hour_and_what_decides_about_a_machine_comes_first():
    assert MINUTES == 30
    first = ["environment", "attention", "fused", "run", "expected", "step"]
    first += ["profile", "save", "ranks"]
    assert list(PARTS)[: len(first)] == first


ENDS_BADLY = """
import os, signal, sys, time
if "--only" in sys.orig_argv:
    part = sys.orig_argv[sys.orig_argv.index("--only") + 1]
    if part == "fused":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "grouped":
        time.sleep(1000)
    if part == "head":
        sys.exit("no head here")
"""


@pytest.mark.soak
def test_parts_that_are_killed_or_hang_or_fail_are_rows_and_the_next_one_runs(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(ENDS_BADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(PARTS, "grouped", PARTS["grouped"]._replace(seconds=0.01))
    out = tmp_path / "out"
    assert runner.run_all(["grouped", "fused", "head", "patches"], out, ["gemma3"], 30, patience=100) == 1
    found = {row.part: row for row in rows.read(out)}
    assert "ended with code -9" in found["fused"].what
    assert "was ended after 1 s" in found["grouped"].what
    assert "no head here" in found["head"].what
    assert [found[part].verdict for part in ("fused", "grouped", "head")] == ["WRONG"] * 3
    assert found["patches"].verdict != "WRONG"
    took = [row.part for row in rows.read(out) if row.what.startswith("the whole part, seconds")]
    assert took == ["grouped", "fused", "head", "patches"]
    listed = json.loads((out / "gpu_check.json").read_text())
    assert list(dict.fromkeys(row["part"] for row in listed["rows"])) == [
        part for part in PARTS if part in found
    ]
    assert "date" in listed["about"]
    assert "| fused | ended with code -9" in (out / "gpu_check.md").read_text()
    assert "Conv3d" in capfd.readouterr().out


BLOCKED = """
import importlib, sys
sys.path[:0] = {paths!r}

class Blocked:
    names = ("megatron.energon", "av", "botocore", "aiobotocore", "s3fs", "multistorageclient", "datasets")

    def get_image_spec(self, name, *_):
        if name in self.names:
            raise ModuleNotFoundError(name + " is for those who read", name=name)

sys.meta_path.insert(0, Blocked())
sys.modules["boto3"] = None  # as where it is not installed: where it is, accelerate imports it
for name in {modules!r}:
    importlib.import_module(name)
"""
MODEL_SIDE = "models.opened training.step training.checkpoint rl.policy generation.generate callbacks.exports"


@pytest.mark.long
def test_models_and_the_check_import_no_readers():
    """Energon, PyAV and object stores are 60 MB of wheels that a machine may lack."""
    modules = [f"megatron_vlm.{name}" for name in (*MODEL_SIDE.split(), "extras.plan.search")]
    modules += [f"gpu_check.{file.stem}" for file in TOOL.glob("*.py") if not file.stem.startswith("__")]
    paths = [str(ROOT / name) for name in ("tools", "tests/helpers", "")]
    code = BLOCKED.format(paths=paths, modules=modules)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
