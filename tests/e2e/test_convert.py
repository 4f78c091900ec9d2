"""The conversion commands, as they are typed: in, out, and compared on a picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from programs import COMMAND, ROOT, run_anew, run_program
from safetensors.torch import load_file, save_file

from tiny.checkpoints import build_tiny_checkpoint

CONVERT = ROOT / "tools" / "convert_checkpoint.py"
EMBEDDING = "model.language_model.embed_tokens.weight"


def convert(*arguments: str | Path) -> subprocess.CompletedProcess:
    return run_program(CONVERT, *arguments, HF_HUB_OFFLINE="1")


def differences(answer: subprocess.CompletedProcess) -> list[float]:
    """(max abs, mean abs, agreement in percent) of what `verify` prints."""
    found = re.search(r"max abs difference (\S+), mean (\S+); .* agrees at (\S+)%", answer.stdout)
    assert found, answer.stdout + answer.stderr
    return [float(number) for number in found.groups()]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A folder with `source`, the `run` it was imported to, and the run's `export`."""
    folder = tmp_path_factory.mktemp("convert")
    build_tiny_checkpoint("qwen3_vl", folder / "source", dtype=torch.bfloat16)
    settings = [f"hf_path={folder}/source", f"run_dir={folder}/run", "tp=1"]
    imported = convert("import", "--recipe", "qwen3_vl_2b", *settings)
    assert imported.returncode == 0, imported.stderr
    (folder / "export.partial").mkdir()
    (folder / "export.partial/thesis.txt").write_text("somebody's")
    exported = convert("export", folder / "run", folder / "export")
    assert exported.returncode == 0, exported.stderr
    return folder


def test_help_shows_the_three_commands():
    lines = run_anew(CONVERT, "--help").stdout.splitlines()
    assert {"import", "export", "verify"} <= {line.split()[0] for line in lines if line.strip()}
    assert not {"train", "generate"} & {line.split()[0] for line in lines if line.strip()}


def test_an_export_of_an_import_has_the_logits_of_the_source(converted):
    answer = convert("verify", converted / "export", converted / "source", "--tolerance", "0")
    assert answer.returncode == 0, answer.stderr
    assert differences(answer) == [0, 0, 100]
    answer = convert("verify", converted / "export", converted / "source", "--json")
    assert json.loads(answer.stdout)["max_abs"] == 0 and json.loads(answer.stdout)["within_tolerance"]


def test_a_run_has_the_logits_of_its_export(converted):
    answer = convert("verify", converted / "run", converted / "export")
    assert answer.returncode == 0, answer.stderr
    assert differences(answer)[0] < 1e-4  # another implementation


def test_a_checkpoint_is_asked_as_its_run_is(converted, tmp_path):
    picture = tmp_path / "a.png"
    Image.new("RGB", (64, 48), "red").save(picture)
    question = ["<image> What?", "--image", picture, "--max-new-tokens", "8"]
    said = [
        run_program(COMMAND, "generate", converted / of, *question, HF_HUB_OFFLINE="1")
        for of in ("run", "source")
    ]
    assert [one.returncode for one in said] == [0, 0] and said[0].stdout == said[1].stdout != "\n"


@pytest.mark.long
def test_a_difference_beyond_the_tolerance_is_code_1_and_the_tensor_named(converted, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(converted / "source", changed)
    tensors = load_file(changed / "model.safetensors")
    tensors[EMBEDDING][7] += 8
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    answer = convert("verify", changed, converted / "source")
    assert answer.returncode == 1
    assert differences(answer)[0] > 1e-3
    heading, worst = answer.stderr.splitlines()[-2:]
    assert heading == "weights that differ most:" and worst.startswith(f"{EMBEDDING}: 8")
