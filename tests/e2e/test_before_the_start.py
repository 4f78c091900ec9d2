"""What a run or a command needs later is looked at before it starts: validation data, files, layouts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from prepared_shards import prepare
from programs import COMMAND, run_program
from safetensors.torch import load_file, save_file
from sources import write_sharegpt

from megatron_vlm.config import ConfigError, ParallelConfig
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config, load_model, load_processor
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.validate import misfit, sizes_in

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`source/data.jsonl`, the same `prepared` as training and validation data, and `texts.jsonl`."""
    folder = tmp_path_factory.mktemp("looked_at")
    source = write_sharegpt(folder / "source", 12)
    splits = {"train": 6, "val": 6}
    prepare(source, folder / "prepared", splits=splits)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"words": f"{n}"}) + "\n" for n in range(150)))
    return folder


@pytest.fixture
def checkpoint(tiny_gemma3, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_gemma3, tmp_path / "checkpoint"))


# ---- validation data --------------------------------------------------------------------------------------


def test_a_run_that_could_not_validate_does_not_begin(folder, tiny_gemma3, tmp_path):
    flags = [f"--hf_path={tiny_gemma3}", "--dataset_type=hf", f"--run_dir={tmp_path}/run"]
    paths = [f"--train_data_path={folder}/source/data.jsonl", f"--valid_data_path={folder}/texts.jsonl"]
    settings = ["tp=1", "eval_every=500", "steps=501", "data.num_workers=0"]
    ended = run_program(COMMAND, "train", "--recipe=gemma3_tiny_digits", *flags, *paths, *settings)
    assert ended.returncode == 2 and "step 1" not in ended.stdout
    fact, remedy = ended.stderr.splitlines()[-2:]
    assert f"data.valid_data_path: {folder}/texts.jsonl gives no sample to validate on" in fact
    assert "150 bad_conversation: write turns" in remedy and "record 0: no turns" in remedy


# ---- scores of answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.score_path={}/texts.jsonl"], "exact_match scores none of the 100 questions of data.valid"),
        (["train.score_metric={}/metric.py:f"], r"metric .*/metric.py:f: KeyError: 'k' in line 2; correct"),
    ],
    ids=["no question", "a metric that fails"],
)
def test_a_run_that_could_not_be_scored_does_not_begin(folder, tiny_gemma3, tmp_path, settings, said):
    (folder / "metric.py").write_text("def f(answer, references, question):\n    raise KeyError('k')\n")
    flags = [f"--hf_path={tiny_gemma3}", "--dataset_type=hf", f"--run_dir={tmp_path}/run"]
    flags += [f"--train_data_path={folder}/source/data.jsonl", "tp=1", "steps=1", "data.num_workers=0"]
    flags += [f"data.score_path={folder}/source/data.jsonl", "train.score_every=1", "eval_every=0"]
    settings = [setting.format(folder) for setting in settings]
    ended = run_program(COMMAND, "train", "--recipe=gemma3_tiny_digits", *flags, *settings)
    assert (ended.returncode, "step 1" in ended.stdout) == (2, False), ended.stderr
    assert re.search(said, ended.stderr.splitlines()[-1]), ended.stderr


# ---- files of a checkpoint --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "is an empty file; download"),
        (lambda content: POINTER, "is a Git LFS pointer, not the file; run `git lfs pull`"),
        (lambda content: content[: len(content) // 2], r"is no JSON object \(.*\); download it again"),
        (lambda content: b"[]", r"is no JSON object \(a list or a number\); download it again"),
    ],
    ids=["empty", "pointer", "cut", "a list"],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
def test_a_damaged_file_of_tokenizer_or_processor_is_named(checkpoint, name, damage, message):
    file = checkpoint / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=f"^{file} {message}"):
        load_processor(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, key: weights.pop(key), r"q_proj.weight is missing; download it again"),
        (
            lambda weights, key: weights.update({key: weights[key][:-8].clone()}),
            r"q_proj.weight is \(120, 64\), and config.json asks for \(128, 64\); download it again",
        ),
    ],
    ids=["missing", "of another shape"],
)
def test_transformers_draws_no_weight_that_files_lack(checkpoint, change, message):
    weights = load_file(checkpoint / "model.safetensors")
    change(weights, min(key for key in weights if key.endswith("q_proj.weight") and "language" in key))
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"checkpoint {checkpoint}: .*{message}"):
        load_model(checkpoint)


# ---- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGS.glob("*.json")))
def test_what_config_json_says_of_a_layout_is_what_the_family_says(name):
    file = CONFIGS / f"{name}.json"
    hf_config = load_config(file)
    architecture = describe(hf_config).architecture
    stated = sizes_in(json.loads(file.read_text()))
    assert {key: architecture.get(key, 0) for key in stated} == stated  # a dense model has no experts
    for tp in (1, 2, 3, 4, 5, 7, 8, 16, 32):
        for more in ({}, {"ep": 3}, {"pp": 200}):
            parallel = ParallelConfig(tp=tp, **more)
            assert not misfit(parallel, stated) or misfit(parallel, {"num_moe_experts": 0, **architecture})
