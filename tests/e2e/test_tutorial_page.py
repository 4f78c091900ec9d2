"""The tutorial does what it shows: its code and its commands, in their order."""

from __future__ import annotations

import re
import shlex

import pytest
from places import ROOT
from programs import COMMAND, run_program

from tiny.checkpoints import build_tiny_checkpoint

PAGE = (ROOT / "docs/start/tutorial.md").read_text(encoding="utf-8")
PRINTED = re.compile(r"^(tokens of a sample|resumed after|exact_match) .*$", re.MULTILINE)


@pytest.mark.long
def test_the_tutorial_prints_what_it_shows(tmp_path):
    draw, ask = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "draw.py").write_text(draw)
    assert run_program(tmp_path / "draw.py", cwd=tmp_path).returncode == 0
    build_tiny_checkpoint("qwen3_vl", tmp_path / "my-model")  # as the page's second step does in its clone

    steps = PAGE[PAGE.index("## 3. ") : PAGE.index("## 9. ")].replace("\\\n", " ")
    commands = re.findall(r"^    megatron-vlm (.*)$", steps, re.MULTILINE)
    again = commands[2].replace("10_epochs", "40_epochs")  # which the page says in a sentence
    commands.insert(4, again)
    assert [command.split()[0] for command in commands] == [
        *("preview", "train", "evaluate", "train", "evaluate", "export", "verify")
    ]
    printed = []
    for command in commands:
        ran = run_program(COMMAND, *shlex.split(command), cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        printed += [match[0] for match in PRINTED.finditer(ran.stdout)]
    assert len(printed) == 4 and [line for line in printed if line not in PAGE] == [], printed

    (tmp_path / "ask.py").write_text(ask)
    ran = run_program(tmp_path / "ask.py", cwd=tmp_path)
    assert ran.stdout.strip() == "The square is green." and ran.returncode == 0, ran.stderr
