"""The package as it is installed: a wheel in an environment of its own, outside of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from places import ROOT
from sources import write_sharegpt

from tiny.checkpoints import build_tiny_checkpoint

UV = [sys.executable, "-m", "uv"]
# what the build reads; it also writes, so it gets a copy
SOURCES = ("pyproject.toml", "README.md", "src", "recipes")
UNINSTALLED = ignore_patterns("__pycache__", "*.egg-info")


def run(*words: object, cwd: Path) -> str:
    """Run a program that knows nothing of the repository; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1"}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([*map(str, words)], **options)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, made of a source archive, without a network."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            copytree(ROOT / name, folder / name, symlinks=True, ignore=UNINSTALLED)
        else:
            (folder / name).write_bytes((ROOT / name).read_bytes())
    options = ["--no-build-isolation", "--python", sys.executable, "--out-dir", folder / "dist"]
    run(*UV, "build", *options, folder, cwd=folder)
    (file,) = (folder / "dist").glob("*.whl")
    return file


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {
        Path(folder, name).relative_to(source).as_posix()
        for folder, _, names in os.walk(source, followlinks=True)
        for name in names
        if "__pycache__" not in folder and ".egg-info" not in folder
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files and "megatron_vlm/recipes/files/qwen3_vl_8b_lora.yaml" in packed


@pytest.mark.long
def test_an_installed_package_trains_by_the_name_of_a_run_file(wheel, tmp_path):
    """The environment has this one's libraries, by a .pth file; its megatron_vlm is the wheel's."""
    python = tmp_path / "venv/bin/python"
    run(*UV, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    run(*UV, "pip", "install", "--no-deps", "--python", python, wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import megatron_vlm as m; print(m.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)

    command = tmp_path / "venv/bin/megatron-vlm"
    assert "Commands:" in run(command, "--help", cwd=tmp_path)
    assert "qwen3_vl_8b_lora" in run(command, "recipes", cwd=tmp_path)
    model = build_tiny_checkpoint("qwen3_vl", tmp_path / "tiny")
    data = write_sharegpt(tmp_path / "chat", 12)
    flags = ["--config", "qwen3_vl_8b_lora", "--model", model, "--data", data, "--dataset-type", "hf"]
    settings = ["steps=2", "tp=1", "dtype=fp32", "global_batch_size=2", "train.eval_every=0", "num_workers=0"]
    run(command, "train", *flags, "--run-dir", "run", *settings, "data.max_drop_share=1", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert "r: 16" in (tmp_path / "run/config.yaml").read_text()
