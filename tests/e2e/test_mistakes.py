"""Everyday mistakes: within two seconds the last line says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from machine import is_quick, processor_seconds

SECONDS = 2.0
COMMAND = [sys.executable, "-m", "megatron_vlm.cli"]
TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
GOOD = {command: shlex.split(words) for command, words in TABLE["good"].items()}


def words_of(row: dict[str, str]) -> list[str]:
    """The words of a row of mistakes.yaml as they are typed."""
    for command in GOOD.keys() & row.keys():
        other_words = shlex.split(row[command])
        replaced = {word.partition("=")[0] for word in [*other_words, row.get("without", "")]}
        kept = [word for word in GOOD[command] if word.partition("=")[0] not in replaced]
        return [command, *kept, *other_words]
    return shlex.split(row["typed"])


def safetensors(size: int = 64) -> bytes:
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def make_everything(folder: Path) -> None:
    """Write the files of all mistakes; a bad checkpoint is the good one with a part changed or left out."""
    parts: dict[str, str | bytes | None] = {
        "config.json": '{"model_type": "gemma3"}',
        "model.safetensors": safetensors(),
        "tokenizer.json": '{"model": {}}',
        "processor_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
    }
    changes: dict[str, dict[str, str | bytes | None]] = {
        "checkpoint": {},
        "bad_config": {"config.json": "{"},
        "llama": {"config.json": '{"model_type": "llama"}'},
        "awq": {"config.json": '{"model_type": "gemma3", "quantization_config": {"quant_method": "awq"}}'},
        "own_code": {
            "config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "x.C"}, "vision_config": {}}'
        },
        "no_weights": {"model.safetensors": None},
        "few_heads": {"config.json": '{"model_type": "qwen3_vl", "text_config": {"num_attention_heads": 4}}'},
    }
    for name, change in changes.items():
        files = {file: content for file, content in (parts | change).items() if content is not None}
        write(folder / name, files)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}]
    row = json.dumps({"images": ["pictures/1.jpg"], "conversations": turns}) + "\n"
    config = (
        "name: run\nmodel: {hf_path: checkpoint}\ndata: {train_data_path: rows.jsonl}\nparallel: {tp: 1}\n"
    )
    write(
        folder,
        {
            "energon/.nv-meta/.info.json": '{"shard_counts": {"a.tar": 1}}',
            "rank_0/adapter_config.json": '{"peft_type": "LORA", "r": 0}',
            "tars/a.tar": b"",
            "trained/config.yaml": config,
            "trained/checkpoints/step_00000001/state.json": "{}",
            "trained/checkpoints/latest": "step_00000001\n",
            "untrained/config.yaml": config,
            "clip.bin": b"\x80\x00" * 100,
            "broken.yaml": "a: [",
            "project/train.py": "",
            "project/checkpoints/model.pt": b"PK",
            "rows.jsonl": row,
            "more/whole.jsonl": row,
            "cut/dataset_info.json": '{"chats": {"file_name": "../rows',
            "sets.json": '{"chats": {"file_name": "rows.jsonl"}, "gone": {"file_name": "gone.jsonl"}}',
            "pictures/1.jpg": b"\xff\xd8",
        },
    )


def environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return inherited | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "COLUMNS": "200"}


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


def check(row: dict[str, str], code: int, output: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output and len(output.splitlines()) <= 4
    assert re.search(row["says"], output.splitlines()[-1]), output
    assert output.replace("\n", "").isprintable()


@pytest.mark.parametrize("row", TABLE["mistakes"], ids=lambda row: row["mistake"])
def test_the_last_line_is_the_reason(row, started):
    """Once its imports are done, which take less than the other half: see `test_cli.py`."""

    def take() -> float:
        print(json.dumps(words_of(row)), file=started.stdin, flush=True)
        code, output, seconds = json.loads(started.stdout.readline())
        check(row, code, output)
        return seconds

    assert is_quick(take, SECONDS / 2)


@pytest.mark.parametrize("row", [TABLE["mistakes"][0], TABLE["mistakes"][-1]], ids=lambda row: row["mistake"])
def test_the_whole_command_takes_two_seconds(row, folder):
    def take() -> float:
        before, options = processor_seconds(), {"cwd": folder, "env": environment(folder)}
        done = subprocess.run(
            [*COMMAND, *words_of(row)], **options, capture_output=True, text=True, timeout=300
        )
        check(row, done.returncode, done.stdout + done.stderr)
        return processor_seconds() - before

    assert is_quick(take, SECONDS)


def test_what_the_mistakes_differ_from_is_none(folder, monkeypatch):
    from megatron_vlm.checks import validate_paths
    from megatron_vlm.recipes import compose
    from megatron_vlm.validate import validate

    monkeypatch.chdir(folder)
    options = dict(word.removeprefix("--").split("=") for word in GOOD["train"])
    layout = f"tp={options.pop('tp')}"
    config = compose(options.pop("recipe"), None, [layout], options)
    validate(config, 1)
    validate_paths(config)


def test_python_refuses_adapters_of_a_run_without_any_as_the_command_does(folder, monkeypatch):
    from megatron_vlm import export

    monkeypatch.chdir(folder)
    [row] = [row for row in TABLE["mistakes"] if row["mistake"] == "the adapters of a run without any"]
    with pytest.raises(ValueError, match=row["says"]):
        export("trained", "out", adapter=True)
