"""The hub's own reason is told, with the command that fetches the files; published sizes need no hub."""

import json

import pytest
from programs import COMMAND, run_program

from megatron_vlm.recipes.published import CONFIGS, SIZES, shipped_config
from megatron_vlm.supported import read_config


def test_a_name_that_is_not_cached_offline_is_told_with_the_command_that_fetches_it():
    with pytest.raises(FileNotFoundError, match="`hf download org/name --local-dir FOLDER` fetches it"):
        read_config("org/name")


def test_every_published_size_comes_with_its_config(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for (family, organisation), sizes in SIZES.items():
        for name, _, _, checkpoint, *_ in sizes:
            file = shipped_config(f"{organisation}/{checkpoint}")
            assert file == CONFIGS / f"{name}.json"
            assert json.loads(file.read_text())["model_type"] == family
    assert shipped_config("org/name") is None


@pytest.mark.long
def test_a_plan_of_a_published_size_needs_no_hub(tmp_path):
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    made = run_program(COMMAND, "plan", "--recipe", "qwen3_vl_2b", "--gpus", "1", **offline)
    line = "Read for Qwen/Qwen3-VL-2B-Instruct: the copy of its config.json in this package."
    assert line in made.stdout, made.stderr
