"""Everyday mistakes: the last line says what is wrong, where and what to do, within two seconds of CPU time.

`python tests/test_mistakes.py --write` makes each of them and writes reports/mistakes.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from machine import is_quick, processor_seconds
from mistaken import POINTER, changed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "reports" / "mistakes.md"
SECONDS = 2.0
COMMAND = [sys.executable, "-m", "megatron_vlm.cli"]
TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
GOOD = {command: shlex.split(words) for command, words in TABLE["good"].items()}


@dataclass(frozen=True)
class Mistake:
    what: str
    words: tuple[str, ...]
    says: str  # a pattern of the last line


def mistake_of(row: dict[str, str]) -> Mistake:
    """A row of mistakes.yaml as the command that is typed."""
    for command in GOOD.keys() & row.keys():
        words = [command, *changed(GOOD[command], shlex.split(row[command]), row.get("without", ""))]
        return Mistake(row["mistake"], tuple(words), row["says"])
    return Mistake(row["mistake"], tuple(shlex.split(row["typed"])), row["says"])


MISTAKES = [mistake_of(row) for row in TABLE["mistakes"]]


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
        "odd_ends": {"generation_config.json": '{"eos_token_id": {"a": 1}}'},
    }
    for name, difference in changed.items():
        files = {key: value for key, value in (parts | difference).items() if value is not None}
        write(folder / name, files)
    info = {".nv-meta/.info.json": '{"shard_counts": {"a.tar": 1}}'}
    write(folder / "energon", info)
    write(folder / "above/inner", info)
    write(folder / "saved", {"state.json": "{}", "dataset_info.json": "{}"})
    write(folder / "adapter", {"adapter_config.json": "{}"})
    write(folder / "rank_0", {"adapter_config.json": '{"peft_type": "LORA", "r": 0}'})
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
            "page.jsonl": "<!doctype html><html>",
            "rows.db": b"SQLite format 3\0" + bytes(99),
            "list.jsonl": "- messages:\n  - role: user\n",
            "column.csv": "text\nhello\nthere\n",
            "project/train.py": "",
            "project/checkpoints/model.pt": b"PK",
            "others/checkpoints/model.pt": b"PK",
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


@contextmanager
def process_in(folder: Path) -> Iterator[subprocess.Popen]:
    """A process that has imported the command line and forks for each mistake."""
    options = {"cwd": folder, "env": environment(folder), "text": True}
    command = [sys.executable, str(Path(__file__).with_name("started.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        yield process
        process.stdin.close()


def forked(mistake: Mistake, folder: Path, process: subprocess.Popen) -> tuple[int, str, float]:
    """As `make`, but in a process forked from there: the seconds are those after the imports."""
    print(json.dumps(mistake.words), file=process.stdin, flush=True)
    code, output, seconds = json.loads(process.stdout.readline())
    return code, output.replace(str(folder), "…"), seconds


@pytest.fixture(scope="module")
def started(folder):
    with process_in(folder) as process:
        yield process


def check(mistake: Mistake, code: int, output: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output and len(output.splitlines()) <= 4
    assert re.search(mistake.says, output.splitlines()[-1]), output
    assert output.replace("\n", "").isprintable()
    assert row(mistake, output) in PAGE.read_text(encoding="utf-8"), f"{PAGE}: run {__file__} --write"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_the_last_line_is_the_reason(mistake, folder, started):
    """Once its imports are done, which take less than the other half: see `test_cli.py`."""

    def take() -> float:
        code, output, seconds = forked(mistake, folder, started)
        check(mistake, code, output)
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
    options = dict(word.removeprefix("--").split("=") for word in GOOD["train"])
    layout = f"tp={options.pop('tp')}"
    config = compose(options.pop("recipe"), None, [layout], options)
    validate(config, 1)
    validate_paths(config)


@pytest.mark.parametrize("shown", TABLE["elsewhere"].values())
def test_the_other_tests_are_there(shown):
    file, name = shown.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def write_page() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_everything(Path(folder))
        lines = []
        with process_in(Path(folder)) as process:
            for mistake in MISTAKES:
                code, output, seconds = forked(mistake, Path(folder), process)
                if code != 2 or not re.search(mistake.says, output.splitlines()[-1]):
                    print(f"{mistake.what} ended with {code}: {output}", file=sys.stderr, flush=True)
                lines.append(f"{row(mistake, output)}{seconds:.1f} |")
    PAGE.write_text(
        "# Everyday mistakes and what is said of them\n\n"
        "`python tests/test_mistakes.py --write` makes each mistake and writes its last line here. "
        "`tests/test_mistakes.py` makes\nthem all again and compares. The seconds are processor time after "
        "the imports of the command line, where this report was\nwritten.\n\n"
        "| mistake | last line | seconds |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n\n"
        "These are read now, or told later; the test shows it.\n\n| mistake | test |\n| --- | --- |\n"
        + "".join(f"| {what} | `{test}` |\n" for what, test in TABLE["elsewhere"].items()),
        encoding="utf-8",
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_page()
