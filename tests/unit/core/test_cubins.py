"""The fused functions compile for a Hopper card, which is not there."""

import json
import subprocess
import sys

import pytest
import torch
import triton
from places import ROOT


@pytest.mark.soak
def test_kernels_for_hopper_need_no_stack_and_are_those_of_the_report():
    report = json.loads((ROOT / "reports" / "cubins.json").read_text(encoding="utf-8"))
    command = [sys.executable, ROOT / "tools" / "cubins.py", ""]  # torch is told of a card in its own process
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["function"] for row in rows} == {row["function"] for row in report["rows"]}
    stacks: dict[tuple[str, str], int] = {}
    for row in rows:
        kernel = row["function"], row["kernel"]
        stacks[kernel] = min(row["stack"], stacks.get(kernel, row["stack"]))
    assert not any(stacks.values()), stacks  # a card takes one of each kernel's configurations
    if (torch.__version__, triton.__version__) == (report["torch"], report["triton"]):
        assert rows == report["rows"]
