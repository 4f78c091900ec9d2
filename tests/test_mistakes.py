"""Everyday mistakes: the last line says what is wrong, where and what to do, within two seconds of CPU time.

`python tests/test_mistakes.py --write` makes each of them and writes reports/mistakes.md.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine import is_quick, processor_seconds

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "reports" / "mistakes.md"
SECONDS = 2.0
COMMAND = [sys.executable, "-m", "megatron_vlm.cli"]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
GOOD = {
    "recipe": "gemma3_tiny_digits",
    "hf_path": "checkpoint",
    "dataset_type": "hf",
    "train_data_path": "rows.jsonl",
    "run_dir": "run",
}


@dataclass(frozen=True)
class Mistake:
    what: str
    words: tuple[str, ...]
    last_line: str  # a pattern


def train(what: str, last_line: str, *more: str, **instead: str | None) -> Mistake:
    """The good command with some of it replaced, left out (None) or added."""
    options = {name: value for name, value in (GOOD | instead).items() if value is not None}
    words = [f"--{name}={value}" for name, value in options.items()]
    return Mistake(what, ("train", *words, "tp=1", *more), last_line)


def energon(what: str, last_line: str, path: str) -> Mistake:
    return train(what, last_line, dataset_type="energon", train_data_path=path)


def prepare(what: str, last_line: str, *words: str) -> Mistake:
    return Mistake(what, ("prepare", *words), last_line)


def compose(what: str, last_line: str, *more: str, output: str = "new", **instead: str) -> Mistake:
    options = {"tower": "siglip2", "language-model": "llama"} | instead
    words = [f"--{name}={value}" for name, value in options.items()]
    return Mistake(what, ("compose", *words, output, *more), last_line)


def checkpoint(what: str, last_line: str, path: str) -> Mistake:
    return train(what, last_line, hf_path=path)


MISTAKES = [
    Mistake(
        "no recipe",
        ("train",),
        r"give --recipe NAME or --config FILE, or --model and --data; the recipes are gemma3_vl_4b, ",
    ),
    train(
        "a recipe that does not exist",
        r"gemma_vl_4b: no such recipe; did you mean gemma3_vl_4b\?",
        recipe="gemma_vl_4b",
    ),
    train(
        "a flag that does not exist", r"--dryrun: `train` has no such flag .there is --dry-run", "--dryrun"
    ),
    Mistake("a command that does not exist", ("exprot", "run", "out"), r"No such command 'exprot'.*export"),
    train("an argument that does not exist", r"tpp: not an argument of a recipe; did you mean tp\?", "tpp=2"),
    train(
        "a setting that does not exist",
        r"train.step: no such setting; did you mean train.steps\?",
        "train.step=2",
    ),
    train(
        "a setting without a value",
        r"train.steps: expected key.path=value, as train.steps=100\.",
        "train.steps",
    ),
    train(
        "a setting as a flag",
        r"--lora-alpha: `train` has no such flag. A setting is written without dashes, as train.steps=10; ",
        "--lora-alpha=16",
    ),
    train(
        "an argument as a flag",
        r"--epochs: `train` has no such flag .there is --nproc.. A setting",
        "--epochs",
        "3",
    ),
    train(
        "a flag of another program",
        r"--deepspeed: `train` has no such flag. .*`megatron-vlm train --help` lists the flags",
        "--deepspeed=zero3.json",
    ),
    train(
        "several files after one flag",
        r"more/whole.jsonl: a path without its flag; give each its own, as --data A --data B\.",
        "more/whole.jsonl",
    ),
    train(
        "a setting under two names",
        r"steps=10 and train.steps=20 both set train.steps; give one of them\.",
        "steps=10",
        "train.steps=20",
    ),
    Mistake(
        "a folder as the page to write",
        ("preview", *("--recipe", "gemma3_tiny_digits"), *("--output", "checkpoint")),
        r"checkpoint is a folder; give the name of an HTML file to write\.",
    ),
    train("a value of the wrong type", r"train.seed: 'many' does not fit; expected int\.", "seed=many"),
    train(
        "a choice that does not exist",
        r"model.dtype: fp16 does not exist; known are bf16, fp32|did you mean bf16",
        "model.dtype=fp16",
    ),
    train(
        "a dataset type that does not exist",
        r"data.dataset_type: parquet does not exist; known are energon, hf",
        dataset_type="parquet",
    ),
    train(
        "a configuration file that is not there",
        r"no.yaml: not readable \(No such file or directory\); give a file",
        config="no.yaml",
        recipe=None,
    ),
    train(
        "a configuration file that is binary",
        r"clip.bin is no text, but a binary file; give a text",
        config="clip.bin",
        recipe=None,
    ),
    train(
        "a folder as configuration file",
        r"checkpoint is a folder, not a file; give a file in its place",
        config="checkpoint",
        recipe=None,
    ),
    train(
        "a configuration file that is no YAML",
        r"broken.yaml: not readable as YAML",
        config="broken.yaml",
        recipe=None,
    ),
    train(
        "a configuration file that is a list",
        r"list.yaml: expected settings as `key: value` lines, found list",
        config="list.yaml",
        recipe=None,
    ),
    checkpoint(
        "a typo in the checkpoint's path",
        r"model.hf_path: ./chekpoint does not exist; give a checkpoint folder",
        "./chekpoint",
    ),
    checkpoint(
        "a hub name without a network",
        r"model.hf_path: google/gemma-3-4b-it does not exist here, nor in the hub's cache, and HF",
        "google/gemma-3-4b-it",
    ),
    checkpoint(
        "a dataset as checkpoint",
        r"model.hf_path: energon is a prepared Energon dataset; give the folder of a Hugging Face checkpoint",
        "energon",
    ),
    checkpoint(
        "rows of `datasets` as checkpoint",
        r"model.hf_path: saved is a dataset saved by `datasets`; give",
        "saved",
    ),
    checkpoint(
        "a run folder as checkpoint",
        r"model.hf_path: trained is a run folder; export it first: megatron-vlm export trained OUTPUT",
        "trained",
    ),
    checkpoint(
        "an adapter as checkpoint",
        r"model.hf_path: adapter is an adapter without its base model; give the folder of its base model,",
        "adapter",
    ),
    checkpoint(
        "a weight file as checkpoint",
        r"model.hf_path: checkpoint/model.safetensors is a file; give the folder",
        "checkpoint/model.safetensors",
    ),
    checkpoint(
        "an empty folder as checkpoint",
        r"model.hf_path: empty is a folder without config.json; give",
        "empty",
    ),
    checkpoint(
        "a damaged config.json",
        r"checkpoint bad_config: config.json is not JSON .*; download it again",
        "bad_config",
    ),
    checkpoint(
        "a model that is not supported",
        r"checkpoint llama: model type 'llama' \(without a vision tower\) is not supported; supported are",
        "llama",
    ),
    checkpoint(
        "a quantised checkpoint",
        r"checkpoint awq: its weights are quantised .*'awq'\), which cannot be trained; take",
        "awq",
    ),
    checkpoint(
        "a checkpoint with code of its own",
        r"checkpoint own_code: model type 'mine'.*code of the checkpoint's own \(auto_map\) is never run",
        "own_code",
    ),
    checkpoint(
        "a checkpoint without weights",
        r"model.hf_path: no_weights holds no weights; add model.safetensors",
        "no_weights",
    ),
    checkpoint(
        "pickled weights only",
        r"model.hf_path: pickled holds only pickled weights, which are not read; convert them",
        "pickled",
    ),
    checkpoint(
        "half a download",
        r"model.hf_path: half holds half a download, model.safetensors.incomplete, and no weights; complete",
        "half",
    ),
    checkpoint(
        "quantised weights that config.json does not tell of",
        r"model.hf_path: bytes: 'x' is stored as U8; only floating-point numbers, .* take the",
        "bytes",
    ),
    checkpoint(
        "a download that is not complete",
        r"model.hf_path: sharded lacks 1 of its 2 weight files, such as model-2.safetensors; complete",
        "sharded",
    ),
    checkpoint(
        "a Git LFS pointer",
        r"pointer/model.safetensors is a Git LFS pointer, not the file; run `git lfs pull`",
        "pointer",
    ),
    checkpoint(
        "a weight file cut short",
        r"cut/model.safetensors holds 100 bytes, its header says 1\d+; download it again",
        "cut",
    ),
    checkpoint(
        "a Git LFS pointer as tokenizer",
        r"pointer_beside/tokenizer.json is a Git LFS pointer, not the file; run `git lfs pull`",
        "pointer_beside",
    ),
    checkpoint(
        "a tokenizer with nothing in it",
        r"empty_tokenizer/tokenizer.json names no model of a tokenizer; download it again",
        "empty_tokenizer",
    ),
    checkpoint(
        "a checkpoint without tokenizer",
        r"model.hf_path: no_tokenizer has no tokenizer .*; copy",
        "no_tokenizer",
    ),
    checkpoint(
        "a checkpoint without image processor",
        r"model.hf_path: no_processor has no image processor .*; copy",
        "no_processor",
    ),
    checkpoint(
        "a checkpoint without chat template",
        r"model.hf_path: no_template has no chat template; put",
        "no_template",
    ),
    train(
        "a typo in the adapter's path",
        r"adapter.start: ./adaptor does not exist; give a folder that peft wrote",
        "adapter.start=./adaptor",
    ),
    train(
        "a checkpoint as adapter",
        r"adapter.start: checkpoint is a Hugging Face checkpoint without adapter_config.json; give",
        "adapter.start=checkpoint",
    ),
    train(
        "a run folder as adapter",
        r"adapter.start: trained is a run folder without .*; export it first: .* export trained OUTPUT --ada",
        "adapter.start=trained",
    ),
    train(
        "a folder of pictures and conversations",
        r"data.train_data_path: together is a .* and rows.jsonl in it is not read; give together/rows",
        train_data_path="together",
    ),
    train(
        "a mapping without a space",
        r"adapter.rank_pattern: .* does not fit; expected dict.*, as adapter.rank_pattern.NAME=VALUE\.",
        "adapter.rank_pattern={q_proj:8}",
    ),
    train(
        "no training data",
        r"data.train_data_path: not set; pass --train_data_path",
        train_data_path=None,
        recipe="gemma3_vl_4b",
    ),
    energon(
        "a dataset that is not there",
        r"data.train_data_path: shards does not exist; write one with `megatron-vlm prepare`",
        "shards",
    ),
    energon(
        "a JSONL file as Energon dataset",
        r"train_data_path: rows.jsonl is a file, .*; set data.dataset_type=hf, or run `megatron-vlm prepare`",
        "rows.jsonl",
    ),
    energon(
        "a folder that is not prepared",
        r"data.train_data_path: tars is a folder of shards that are not prepared; give a folder that",
        "tars",
    ),
    energon(
        "the folder above the dataset",
        r"data.train_data_path: above is not a prepared Energon dataset; give above/inner, which is",
        "above",
    ),
    energon(
        "a checkpoint as dataset",
        r"data.train_data_path: checkpoint is a Hugging Face checkpoint; give a folder that",
        "checkpoint",
    ),
    energon(
        "rows of `datasets` as Energon dataset",
        r"data.train_data_path: saved is a dataset saved by `datasets`; set data.dataset_type=hf",
        "saved",
    ),
    train(
        "an Energon dataset as rows",
        r"train_data_path: energon is a prepared Energon dataset; train from it, .*dataset_type=energon",
        train_data_path="energon",
    ),
    train(
        "a checkpoint as rows",
        r"data.train_data_path: checkpoint is a Hugging Face checkpoint, not a dataset; give",
        train_data_path="checkpoint",
    ),
    train(
        "a typo in the data's path",
        r"data.train_data_path: row.jsonl does not exist; give a file or folder",
        train_data_path="row.jsonl",
    ),
    train(
        "a share of the data that is no number",
        r"rows.jsonl\*x does not exist; give a file or folder of conversations, or a hub name",
        train_data_path="rows.jsonl*x",
    ),
    train(
        "none of the data",
        r"data.train_data_path: rows.jsonl: an epoch would have none of its rows; leave it out",
        train_data_path="rows.jsonl*0",
    ),
    train(
        "a pattern of files as data",
        r"path: \*.jsonl does not exist; give a file or folder of conversations, or a hub name",
        train_data_path="*.jsonl",
    ),
    train(
        "a hub dataset without a network",
        r"data.train_data_path: org/data does not exist here, nor in the caches, .*; give",
        train_data_path="org/data",
    ),
    train(
        "an empty file as data",
        r"data.train_data_path: empty.jsonl is an empty file; download or write it again",
        train_data_path="empty.jsonl",
    ),
    train(
        "an empty folder as data",
        r"data.train_data_path: empty is a folder without files; give",
        train_data_path="empty",
    ),
    train(
        "a binary file as data",
        r"data.train_data_path: clip.bin is a binary file of no known kind; download it again",
        train_data_path="clip.bin",
    ),
    train(
        "a text file as data",
        r"data: notes.jsonl: is not valid JSON \(Expecting .* line 1 .*\); repair it or convert it",
        train_data_path="notes.jsonl",
    ),
    train(
        "data that Git LFS did not load",
        r"data.train_data_path: lfs.jsonl is a Git LFS pointer, not the file; run `git lfs pull`",
        train_data_path="lfs.jsonl",
    ),
    train(
        "data in latin-1",
        r"data.train_data_path: latin.csv is text that is not in UTF-8; run `iconv -f",
        train_data_path="latin.csv",
    ),
    train(
        "images by their addresses",
        r"none of the first 1 .*, such as https://a.org/1.jpg; give .*, or download them\.",
        train_data_path="addresses.jsonl",
    ),
    train(
        "validation data that is not there",
        r"data.valid_data_path: val.jsonl does not exist; give",
        valid_data_path="val.jsonl",
    ),
    train(
        "images in another folder",
        r"none of the first 1 media paths .*, such as 1.jpg; give data.media_dir=FOLDER, where these paths",
        train_data_path="elsewhere.jsonl",
    ),
    train(
        "images by whole paths that lead elsewhere",
        r"such as …/pictures/1.jpg; give data.media_dir=FOLDER, where these paths start",
        train_data_path="more/whole.jsonl",
    ),
    train(
        "a media folder that is not there",
        r"data.media_dir=imgs is not a folder; give",
        "data.media_dir=imgs",
    ),
    train(
        "preference pairs without a rejected answer",
        r"data.train_data_path: rows.jsonl: its first 1 records have no rejected answer \(rejected, .*; give",
        "objective=dpo",
    ),
    train(
        "preference pairs that are to be cut",
        r"data.over_length: truncate would cut one answer of a pair .*, raise data.seq_length .*, or drop",
        "objective=dpo",
        "data.over_length=truncate",
    ),
    train(
        "preference pairs without weights to compare with",
        r"train.objective: dpo compares with the weights of model.hf_path, .* is false; set it to true\.",
        "objective=dpo",
        "load_weights=false",
    ),
    train(
        "an objective that does not exist",
        r"train.objective: dpoo does not exist; did you mean dpo\?",
        "objective=dpoo",
    ),
    train(
        "a file as run folder",
        r"run_dir: rows.jsonl cannot be made, rows.jsonl is a file; give another",
        run_dir="rows.jsonl",
    ),
    train(
        "a run folder inside a file",
        r"run_dir: rows.jsonl/run cannot be made, .*rows.jsonl is a file; give",
        run_dir="rows.jsonl/run",
    ),
    train(
        "a run folder where nobody may write",
        r"run_dir: /proc/1/run: you may not write in /proc/1; give|run_dir: /proc",
        run_dir="/proc/1/run",
    ),
    train(
        "the checkpoint as run folder",
        r"run_dir: checkpoint holds a checkpoint \(config.json\) and no run; give a folder that is new",
        run_dir="checkpoint",
    ),
    train(
        "the dataset's folder as run folder",
        r"run_dir: pictures holds other things, such as 1.jpg and no run; give a folder that is new or empty",
        run_dir="pictures",
    ),
    train(
        "a run folder with a link in it",
        r"linked/lock is a link, and nothing is written through links; move what it leads to",
        run_dir="linked",
    ),
    train(
        "one process for two",
        r"this layout needs 2 processes and this is one; add --nproc 2",
        "tp=2",
    ),
    train(
        "processes that the layout does not divide",
        r"tp 3 .* = 3 does not divide 4 processes; change",
        "tp=3",
        "--nproc=4",
    ),
    train(
        "a layout that does not divide the model",
        r"parallel: tp = 3 does not divide the model's 4 attention heads; change tp\.",
        "tp=3",
        *("global_batch_size=3", "micro_batch_size=1", "--nproc=3"),
        hf_path="few_heads",
    ),
    train(
        "fewer records than data-parallel ranks",
        r"data.train_data_path: rows.jsonl has 1 of the 2 records that as many data-parallel ranks need; use",
        *("global_batch_size=2", "micro_batch_size=1", "--nproc=2"),
    ),
    train("epochs without end", r"train.epochs: inf is not a finite number\.", "epochs=inf"),
    train("no process", r"Invalid value for '--nproc': ", "--nproc=0"),
    train(
        "a batch that does not divide",
        r"train.global_batch_size: 3 is not divisible by micro_batch_size 2 .*; use 2 or 4",
        "global_batch_size=3",
        "micro_batch_size=2",
    ),
    train(
        "nothing left to train",
        r"model.freeze: tower, projector and language_model are all there is; leave one of them out\.",
        "model.freeze=[tower,projector,language_model]",
    ),
    train("a watchdog without patience", r"train.hang_seconds: 0 is less than 1\.", "train.hang_seconds=0"),
    Mistake(
        "export of a folder that is no run",
        ("export", "checkpoint", "out"),
        r"checkpoint is a Hugging Face checkpoint, not the folder of a run; give what was --run_dir when it",
    ),
    Mistake(
        "export of a part of a run",
        ("export", "trained/checkpoints/step_00000001", "out"),
        r"trained/checkpoints/step_00000001 is a folder without config.yaml, not the folder of a run; give",
    ),
    Mistake(
        "export of a run without checkpoint",
        ("export", "untrained", "out"),
        r"untrained: no complete checkpoint in this run folder; train it first",
    ),
    Mistake(
        "export over something",
        ("export", "trained", "checkpoint"),
        r"checkpoint exists; give a new name or remove it",
    ),
    Mistake(
        "a question to a run that is not there",
        ("generate", "./rnu", "What is this?"),
        r"\./rnu does not exist; give a checkpoint folder or a Hugging Face hub name\.",
    ),
    Mistake(
        "an image that is not there",
        ("generate", "trained", "What?", "--image=no.png"),
        r"--image: no.png does not exist; give the path of an image file\.",
    ),
    Mistake(
        "a comparison with a file",
        ("verify", "trained", "checkpoint/config.json"),
        r"checkpoint/config.json is a file; give the folder that holds config.json and the weights\.",
    ),
    Mistake(
        "a comparison of two models",
        ("verify", "checkpoint", "few_heads"),
        r"verify: checkpoint is of model type gemma3, and few_heads of qwen3_vl; give two checkpoints",
    ),
    Mistake(
        "a comparison with half a download",
        ("verify", "cut", "checkpoint"),
        r"cut/model.safetensors holds 100 bytes, its header says 1\d+; download it again",
    ),
    Mistake(
        "several greedy answers",
        ("generate", "trained", "What?", "--answers=4"),
        r"--answers 4: at temperature 0 all are the same; add --temperature 1, or ask for one",
    ),
    Mistake(
        "a step that never was",
        ("replay", "trained", "--step=9"),
        r"trained: no batch of step 9 in batches/; it holds no step",
    ),
    prepare(
        "preparing a file that is not there",
        r"prepare: source row.jsonl does not exist; give a file or folder",
        *("row.jsonl", "out"),
    ),
    prepare(
        "preparing a folder of pictures",
        r"prepare: source pictures is a folder of media alone; give the folder or file of the conversations",
        *("pictures", "out"),
    ),
    prepare(
        "preparing a folder of pictures and conversations",
        r"prepare: source together is a .* and rows.jsonl in it is not read; give together/rows",
        *("together", "out"),
    ),
    prepare(
        "preparing an empty folder",
        r"prepare: source empty is a folder without files; give",
        *("empty", "out"),
    ),
    prepare(
        "preparing a checkpoint",
        r"prepare: source checkpoint is a Hugging Face checkpoint, not a dataset; give",
        *("checkpoint", "out"),
    ),
    prepare(
        "preparing what is prepared",
        r"prepare: source energon is a prepared Energon dataset; train from it",
        *("energon", "out"),
    ),
    prepare(
        "preparing a binary file",
        r"prepare: source clip.bin is a binary file of no known kind; download it again",
        *("clip.bin", "out"),
    ),
    prepare(
        "preparing without the folder of the images",
        r"none of the first 1 media paths .*, such as 1.jpg; give --image-root FOLDER, where these",
        *("elsewhere.jsonl", "out"),
    ),
    prepare(
        "an image root that is not there",
        r"prepare: source rows.jsonl: --image-root imgs is not a folder; give",
        *("rows.jsonl", "out", "--image-root=imgs"),
    ),
    prepare(
        "preparing into a folder that holds something",
        r"…/checkpoint exists; give a new name or remove it",
        *("rows.jsonl", "checkpoint"),
    ),
    prepare("preparing without an output", r"Missing argument 'sources'", "rows.jsonl"),
    prepare(
        "a split without a size",
        r"prepare: --split train; write NAME=SIZE, such as train=0.9",
        *("rows.jsonl", "out", "--split=train"),
    ),
    Mistake(
        "composing without a tower",
        ("compose", "--language-model=llama", "new"),
        r"Missing option '--tower'",
    ),
    compose(
        "a typo in the tower's path",
        r"--tower: ./siglip does not exist; give a checkpoint folder or a Hugging Face hub name",
        tower="./siglip",
    ),
    compose(
        "a language model as tower",
        r"--tower llama: no tower, its model type is 'llama'; it is a language model: give it as --lang",
        tower="llama",
    ),
    compose(
        "a tower as language model",
        r"--language-model siglip2: no language model .*; it is a vision model: give it as --tower",
        **{"language-model": "siglip2"},
    ),
    compose(
        "a language model of another kind",
        r"--language-model checkpoint: no language model .*'gemma3'; give one of llama, mistral, qwen2",
        **{"language-model": "checkpoint"},
    ),
    compose(
        "a quantised language model",
        r"--language-model awq_llama: its weights are quantised .*; give the checkpoint in bf16",
        **{"language-model": "awq_llama"},
    ),
    compose(
        "composing into a folder that holds something",
        r"pictures exists; give a new name or remove it",
        output="pictures",
    ),
    compose(
        "a role that does not exist",
        r"--token images=<i>: images is no role; did you mean image\?",
        "--token=images=<i>",
    ),
    compose("a role without a token", r"--token image: no token; write ROLE=TOKEN", "--token=image"),
    compose(
        "a way to make rows that does not exist",
        r"--new-rows zero does not exist; known are mean, normal",
        "--new-rows=zero",
    ),
    compose(
        "sizes of images for a tower that has its own",
        r"with a clip_vision_model they are given; leave them out, or give a SigLIP2 NaFlex tower",
        "--max-image-tokens=64",
        tower="clip",
    ),
    compose(
        "tokens of an image that small oblong ones cannot have",
        r"with min_image_tokens 256 a small image, scaled up, has up to 288 tokens, .* raise max_image_tok",
        "--min-image-tokens=256",
    ),
    train(
        "a name that a terminal would obey",
        r"model.hf_path: \./\\x1b\[31mred\\n\\u202e does not exist; give",
        hf_path="./\x1b[31mred\n\u202e",
    ),
]


def safetensors(size: int = 64) -> bytes:
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def record(image: str) -> str:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}]
    return json.dumps({"images": [image], "conversations": turns}) + "\n"


def make_everything(folder: Path) -> None:
    """What the mistakes are made with; an odd checkpoint is the good one with a part changed or left out."""
    parts: dict[str, str | bytes] = {
        "config.json": '{"model_type": "gemma3"}',
        "model.safetensors": safetensors(),
        "tokenizer.json": '{"model": {}}',
        "processor_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
    }
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    without_weights = {"model.safetensors": None}
    changed: dict[str, dict] = {
        "checkpoint": {},
        "bad_config": {"config.json": "{"},
        "llama": {"config.json": '{"model_type": "llama"}'},
        "siglip2": {"config.json": '{"model_type": "siglip2_vision_model"}'},
        "clip": {"config.json": '{"model_type": "clip", "vision_config": {}}'},
        "awq_llama": {
            "config.json": '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}'
        },
        "awq": {"config.json": '{"model_type": "gemma3", "quantization_config": {"quant_method": "awq"}}'},
        "own_code": {
            "config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "x.C"}, "vision_config": {}}'
        },
        "no_weights": without_weights,
        "pickled": without_weights | {"pytorch_model.bin": b"PK"},
        "half": without_weights | {"model.safetensors.incomplete": safetensors()[:100]},
        "bytes": {
            "model.safetensors": safetensors().replace(b'"F32", "shape": [16]', b'"U8", "shape": [ 64]')
        },
        "sharded": without_weights
        | {"model.safetensors.index.json": json.dumps(index), "model-1.safetensors": safetensors()},
        "pointer": {"model.safetensors": POINTER},
        "pointer_beside": {"tokenizer.json": POINTER},
        "empty_tokenizer": {"tokenizer.json": "{}"},
        "few_heads": {"config.json": '{"model_type": "qwen3_vl", "text_config": {"num_attention_heads": 4}}'},
        "cut": {"model.safetensors": safetensors()[:100]},
        "no_tokenizer": {"tokenizer.json": None},
        "no_processor": {"processor_config.json": None},
        "no_template": {"chat_template.jinja": None},
    }
    for name, difference in changed.items():
        files = {key: value for key, value in (parts | difference).items() if value is not None}
        write(folder / name, files)
    info = {".nv-meta/.info.json": '{"shard_counts": {"a.tar": 1}}'}
    write(folder / "energon", info)
    write(folder / "above/inner", info)
    write(folder / "saved", {"state.json": "{}", "dataset_info.json": "{}"})
    write(folder / "adapter", {"adapter_config.json": "{}"})
    write(folder / "tars", {"a.tar": b""})
    config = (
        "name: run\nmodel: {hf_path: checkpoint}\ndata: {train_data_path: rows.jsonl}\nparallel: {tp: 1}\n"
    )
    write(
        folder / "trained",
        {
            "config.yaml": config,
            "checkpoints/step_00000001/state.json": "{}",
            "checkpoints/latest": "step_00000001\n",
        },
    )
    write(folder / "untrained", {"config.yaml": config})
    (folder / "empty").mkdir()
    (folder / "linked").mkdir()
    (folder / "linked/lock").symlink_to(folder / "rows.jsonl")
    write(
        folder,
        {
            "clip.bin": b"\x80\x00" * 100,
            "broken.yaml": "a: [",
            "list.yaml": "- a\n",
            "empty.jsonl": "",
            "notes.jsonl": "remember the milk\n",
            "lfs.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "latin.csv": "question,answer\noù?,là\n".encode("latin-1"),
            "addresses.jsonl": record("https://a.org/1.jpg"),
            "rows.jsonl": record("pictures/1.jpg"),
            "elsewhere.jsonl": record("1.jpg"),
            "more/whole.jsonl": record(str(folder / "pictures" / "1.jpg")),
            "pictures/1.jpg": b"\xff\xd8",
            "together/rows.jsonl": record("1.jpg"),
            **dict.fromkeys(("together/1.jpg", "together/2.jpg"), b"\xff\xd8"),
        },
    )


def environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return inherited | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "COLUMNS": "200"}


def make(mistake: Mistake, folder: Path) -> tuple[int, str, float]:
    """(exit code, all that was printed, seconds of processor time)."""
    before = processor_seconds()
    command, options = [*COMMAND, *mistake.words], {"cwd": folder, "env": environment(folder)}
    done = subprocess.run(command, **options, capture_output=True, text=True, timeout=300)
    seconds = processor_seconds() - before
    return done.returncode, (done.stdout + done.stderr).replace(str(folder), "…"), seconds


def row(mistake: Mistake, output: str) -> str:
    """A line of the page, up to the seconds."""
    cells = (mistake.what, f"`{output.splitlines()[-1]}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " | "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mistakes")
    make_everything(made)
    return made


@pytest.fixture(scope="module")
def started(folder):
    """A process that has imported the command line and forks for each mistake."""
    options = {"cwd": folder, "env": environment(folder), "text": True}
    command = [sys.executable, str(Path(__file__).with_name("started.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        yield process
        process.stdin.close()


def check(mistake: Mistake, code: int, output: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output and len(output.splitlines()) <= 4
    assert re.search(mistake.last_line, output.splitlines()[-1]), output
    assert output.replace("\n", "").isprintable()
    assert row(mistake, output) in PAGE.read_text(encoding="utf-8"), f"{PAGE}: run {__file__} --write"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_the_last_line_is_the_reason(mistake, folder, started):
    """Once its imports are done, which take less than the other half: see `test_cli.py`."""

    def take() -> float:
        print(json.dumps(mistake.words), file=started.stdin, flush=True)
        code, output, seconds = json.loads(started.stdout.readline())
        check(mistake, code, output.replace(str(folder), "…"))
        return seconds

    assert is_quick(take, SECONDS / 2)


@pytest.mark.parametrize("mistake", [MISTAKES[0], MISTAKES[-1]], ids=lambda mistake: mistake.what)
def test_the_whole_command_takes_two_seconds(mistake, folder):
    def take() -> float:
        code, output, seconds = make(mistake, folder)
        check(mistake, code, output)
        return seconds

    assert is_quick(take, SECONDS)


def test_what_the_mistakes_differ_from_is_none(folder, monkeypatch):
    from megatron_vlm.checks.paths import validate_paths
    from megatron_vlm.config_rules.settings import validate
    from megatron_vlm.recipes import compose

    monkeypatch.chdir(folder)
    arguments = {name: value for name, value in GOOD.items() if name != "recipe"}
    config = compose(GOOD["recipe"], None, ["tp=1"], arguments)
    validate(config, 1)
    validate_paths(config)


def write_page() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_everything(Path(folder))
        lines = []
        for mistake in MISTAKES:
            _, output, seconds = make(mistake, Path(folder))
            lines.append(f"{row(mistake, output)}{seconds:.1f} |")
            print(lines[-1], flush=True)
    PAGE.write_text(
        "# Everyday mistakes and what is said of them\n\n"
        "`python tests/test_mistakes.py --write` makes each mistake and writes its last line here. "
        "`tests/test_mistakes.py` makes\nthem all again and compares. The seconds are processor time where "
        "this report was written.\n\n"
        "| mistake | last line | seconds |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_page()
