"""What a run or a command needs later is looked at before it starts: validation data, files, layouts."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from prepared_shards import prepare
from programs import COMMAND, run_program
from safetensors.torch import load_file, save_file
from sources import write_sharegpt
from transformers import AutoProcessor

from megatron_vlm.checks.paths import validate_paths
from megatron_vlm.config import ConfigError, DataConfig, ParallelConfig, RunConfig
from megatron_vlm.config_rules.layout import misfit, sizes_in
from megatron_vlm.data.accounts.drops import TooManyDrops
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.models.families import describe
from megatron_vlm.models.hf import load_config, load_model, load_processor
from megatron_vlm.models.layers.attention_sizes import Heads
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.run_folder.folder import check_folder

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


def valid_loader(provider, processor, path: Path, seq_length: int = 256, **settings):
    data = DataConfig(train_data_path=str(path), seq_length=seq_length, num_workers=2, **settings)
    encoder = HFEncoderVLMTaskEncoder(processor, data)
    loader = provider(data).valid_loader(encoder, micro_batch_size=2, rank=0, world_size=2)
    return loader, encoder


@pytest.mark.parametrize(
    ("provider", "path", "reason", "settings"),
    [
        (HFProvider, "texts.jsonl", "150 bad_conversation: write turns of role", {"valid_data_path": True}),
        (EnergonProvider, "prepared", "6 over_length: raise data.seq_length", {"seq_length": 4}),
        (
            HFProvider,
            "source/data.jsonl",
            "over_length: raise data.seq",
            {"seq_length": 4, "validation_share": 0.5},
        ),
    ],
)
def test_a_look_at_validation_data_says_why_all_is_dropped(
    folder, tiny_gemma3, provider, path, reason, settings
):
    path = folder / path
    settings = {key: str(path) if value is True else value for key, value in settings.items()}
    loader, encoder = valid_loader(provider, AutoProcessor.from_pretrained(tiny_gemma3), path, **settings)
    with pytest.raises(TooManyDrops, match="gives no sample to validate on") as refusal:
        loader.first_batch()
    first, *reasons = str(refusal.value).splitlines()
    assert ("validation_share" in settings) or str(path) in first
    assert reason in reasons[0] and len(reasons) == 1
    assert encoder.drops.counted() == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("provider", "path"), [(HFProvider, "source/data.jsonl"), (EnergonProvider, "prepared")]
)
def test_a_look_at_good_validation_data_changes_nothing(folder, tiny_gemma3, provider, path):
    settings = {"valid_data_path": str(folder / path)}
    processor = AutoProcessor.from_pretrained(tiny_gemma3)
    loader, encoder = valid_loader(provider, processor, folder / path, **settings)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert len(loader.first_batch()["input_ids"]) == 2
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert encoder.drops.counted() == [0, 0]
    assert sum(len(batch["__key__"]) for batch in loader) == (6 if provider is HFProvider else 3)
    assert encoder.drops.counted()[0] in (6, 3)


def test_a_run_that_could_not_validate_does_not_begin(folder, tiny_gemma3, tmp_path):
    flags = [f"--hf_path={tiny_gemma3}", "--dataset_type=hf", f"--run_dir={tmp_path}/run"]
    paths = [f"--train_data_path={folder}/source/data.jsonl", f"--valid_data_path={folder}/texts.jsonl"]
    settings = ["tp=1", "eval_every=500", "steps=501", "data.num_workers=0"]
    ended = run_program(COMMAND, "train", "--recipe=gemma3_tiny_digits", *flags, *paths, *settings)
    assert ended.returncode == 2 and "step 1" not in ended.stdout
    fact, remedy = ended.stderr.splitlines()[-2:]
    assert f"data.valid_data_path: {folder}/texts.jsonl gives no sample to validate on" in fact
    assert "150 bad_conversation: write turns" in remedy and "record 0: no turns" in remedy


@pytest.mark.parametrize("provider", [HFProvider, EnergonProvider])
def test_each_source_of_validation_data_is_looked_at(folder, tiny_gemma3, tmp_path, provider):
    """The first batch of all is good."""
    if provider is HFProvider:
        (tmp_path / "bad").write_text((folder / "texts.jsonl").read_text())
        good, reason = folder / "source/data.jsonl", "150 bad_conversation"
    else:
        source = tmp_path / "source"
        shutil.copytree(folder / "source", source)
        rows = [json.loads(line) for line in (source / "data.jsonl").read_text().splitlines()]
        for row in rows:
            row["conversations"][-1]["value"] = "long " * 300
        (source / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prepare(source / "data.jsonl", tmp_path / "bad", splits={"train": 6, "val": 6})
        good, reason = folder / "prepared", "6 over_length"
    paths = {"valid_data_path": [f"good={good}", f"bad={tmp_path / 'bad'}"]}
    loader, encoder = valid_loader(provider, AutoProcessor.from_pretrained(tiny_gemma3), good, **paths)
    assert len(loader.first_batch()["input_ids"]) == 2
    with pytest.raises(TooManyDrops, match=rf"source bad gives no sample to validate on:\n +{reason}"):
        loader.look()
    assert encoder.drops.counted() == [0, 0]


# ---- scores of answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.score_path={}/texts.jsonl"], "exact_match scores none of the 100 questions of data.valid"),
        (["train.score_metric=boxes"], "boxes scores none of the 12 questions.*: its reference has no box"),
        (["train.best_by=score/iou", "train.keep_best=true"], "score/iou is no figure that there is; there"),
        (["train.score_metric={}/metric.py:f"], r"metric .*/metric.py:f: KeyError: 'k' in line 2; correct"),
    ],
    ids=["no question", "no box", "no figure", "a metric that fails"],
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


def test_a_path_of_questions_is_looked_at_like_that_of_the_data(folder, tmp_path):
    config = RunConfig(run_dir=str(tmp_path / "run"))
    config.data.score_path = f"{folder}/nothing.jsonl"
    with pytest.raises(ConfigError, match=r"data.score_path: \S*/nothing.jsonl does not exist; give a file"):
        validate_paths(config)
    config.data.score_path = f"{folder}/prepared"
    with pytest.raises(ConfigError, match=r"data.score_path: \S*/prepared is a prepared Energon dataset; "):
        validate_paths(config)


def test_a_file_in_place_of_the_folder_of_exports_is_named(tmp_path):
    (tmp_path / "exports").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir: \S*/exports is not a folder; give another run_dir.$"):
        check_folder(tmp_path)


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


def test_a_pointer_is_named_before_the_start(checkpoint):
    (checkpoint / "chat_template.jinja").write_bytes(POINTER)
    config = apply_overrides(RunConfig(), {"model.hf_path": str(checkpoint), "run_dir": "run"})
    with pytest.raises(ConfigError, match=f"^{checkpoint}/chat_template.jinja is a Git LFS pointer"):
        validate_paths(config, needs_data=False)


def test_a_chat_template_with_a_syntax_error_is_named_with_its_line(checkpoint):
    file = checkpoint / "chat_template.jinja"
    file.write_text("{{ bos_token }}\n{% for message in %}\n")
    with pytest.raises(
        ConfigError, match=r"line 2 of its chat template is not Jinja \(.*\); correct chat_te"
    ):
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


def test_ranks_that_do_not_divide_gated_delta_nets_are_refused():
    sizes = describe(load_config(CONFIGS / "qwen35_27b.json")).architecture
    assert misfit(ParallelConfig(tp=4, cp=4), sizes) is None
    assert misfit(ParallelConfig(tp=4, cp=8), sizes) == (
        "parallel: tp · cp = 32 does not divide the model's 16 key heads of gated delta nets; change tp · cp."
    )


@pytest.mark.parametrize(
    "sizes", [{"layer_inputs": 256}, {"layer_heads": (Heads(64, 2), Heads(64, 2, source=0))}]
)
def test_stages_are_refused_for_what_layers_take_from_earlier_ones(sizes):
    assert misfit(ParallelConfig(tp=2, cp=2), sizes) is None
    assert misfit(ParallelConfig(pp=2), sizes) == (
        "parallel: pp 2 would cut a model whose layers take keys and values or inputs from earlier stages, "
        "which is not implemented; use pp 1, with tp, cp or recomputation."
    )


def test_a_layout_that_does_not_divide_the_model_is_refused_before_the_ranks_start(checkpoint):
    settings = {"model.hf_path": str(checkpoint), "run_dir": "run", "parallel.tp": 3}
    with pytest.raises(ConfigError, match="tp = 3 does not divide the model's 4 attention heads; change tp"):
        validate_paths(apply_overrides(RunConfig(), settings), needs_data=False)


@pytest.mark.parametrize("command", ["nothere --x", "./nothere", " nothere"])
def test_a_command_that_the_shell_does_not_know_is_named(tmp_path, checkpoint, command):
    config = apply_overrides(RunConfig(), [f"model.hf_path={checkpoint}", f"run_dir={tmp_path / 'run'}"])
    for known in ("true x", "cd /tmp && nothere", "A=1 nothere", "/bin/sh x.sh", "if true; then a; fi"):
        config.train.on_export = known
        validate_paths(config, needs_data=False)
    config.train.on_export = command
    with pytest.raises(ConfigError, match=f"train.on_export: sh knows no {command.split()[0]}; correct it"):
        validate_paths(config, needs_data=False)
