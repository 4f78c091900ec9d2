"""The mistakes that a second trial found poorly told, with their last lines now; see second_trial.yaml.

`python tests/test_second_trial.py --write` makes each of them with a tiny checkpoint and writes
reports/second_trial.md; the test makes them again and compares.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "helpers")]

from mistaken import POINTER, changed  # noqa: E402
from programs import COMMAND, run_program  # noqa: E402
from sources import image_bytes  # noqa: E402

from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

PAGE = ROOT / "reports" / "second_trial.md"
TABLE = yaml.safe_load(Path(__file__).with_name("second_trial.yaml").read_text(encoding="utf-8"))
GOOD = shlex.split(TABLE["good"])
MADE = [row for row in TABLE["rows"] if "says" in row]
SHOWN = [row for row in TABLE["rows"] if "shown" in row]
PLAIN = [{"question": "<image>what?", "answer": "that", "image": f"images/{n}.png"} for n in range(8)]
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(9)
NO_IMAGES = {
    "heic": HEIC,
    "pdf": b"%PDF-1.7\n",
    "pointers": POINTER.encode(),
    "mp3": b"ID3\4" + bytes(99),
    "html": b"<html>404",
    "film": b"\0\0\0\x18ftypisom\0\0\0\0isommp41" + bytes(9),
}


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def with_image(name: object) -> str:
    """The rows with another `image`: a text in which {} is its number, or what a function makes of that."""
    named = name if callable(name) else name.format
    return lines([row | {"image": named(number)} for number, row in enumerate(PLAIN)])


def table(delimiter: str) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(PLAIN[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(PLAIN)
    return text.getvalue()


def png(number: int) -> bytes:
    return image_bytes(number, "PNG")


def write_rows(folder: Path) -> None:
    (folder / "images").mkdir()
    (folder / "images/photo.heic").write_bytes(HEIC)
    for number in range(len(PLAIN)):
        (folder / f"images/{number}.png").write_bytes(png(number))
        for kind, content in NO_IMAGES.items():
            (folder / f"images/{number}.{kind}").write_bytes(content)
    texts = {
        "rows.jsonl": lines(PLAIN),
        "addresses.jsonl": with_image("https://example.org/{}.png"),
        "img.jsonl": lines(PLAIN).replace("<image>", "<img>"),
        "pad.jsonl": lines(PLAIN).replace("<image>", "<|image_pad|>"),
        "rows.csv": table(","),
        "rows.tsv": table("\t"),
        "csv.jsonl": table(","),
        "cr.jsonl": lines(PLAIN).replace("\n", "\r"),
        "array.jsonl": json.dumps(PLAIN),
        "pretty.jsonl": json.dumps(PLAIN, indent=1),
        "mapping.json": json.dumps({f"id {number}": row for number, row in enumerate(PLAIN)}),
        "page.jsonl": "<!doctype html><html>",
        "lfs.jsonl": POINTER,
        "base64.jsonl": with_image(lambda number: base64.b64encode(png(number)).decode()),
        "one.jsonl": lines(PLAIN[:1]),
        "windows.jsonl": with_image("images\\{}.png"),
        "upper.jsonl": with_image("IMAGES/{}.PNG"),
        "space.jsonl": with_image(" images/{}.png"),
        "columns.jsonl": lines([{"inquiry": "what?", "reply": "that"}] * 8),
        "bad.jsonl": lines(PLAIN[:7]) + with_image("none/{}.png").splitlines()[7] + "\n",
        "notes.txt": "remember the milk\n",
        **{f"{kind}.jsonl": with_image(f"images/{{}}.{kind}") for kind in NO_IMAGES},
    }
    for name, text in texts.items():
        (folder / name).write_text(text, newline="")
    (folder / "utf16.jsonl").write_bytes(lines(PLAIN).encode("utf-16"))
    (folder / "latin.jsonl").write_bytes(lines(PLAIN).replace("what", "où").encode("latin-1"))
    for name in ("rows.jsonl.gz", "gz.jsonl"):
        (folder / name).write_bytes(gzip.compress(lines(PLAIN).encode()))
    pictures = [{"question": "what?", "answer": "a", "pictures": [png(n)]} for n in range(8)]
    pa.parquet.write_table(pa.Table.from_pylist(pictures), folder / "pictures.parquet")
    saved = datasets.Dataset.from_list(PLAIN)
    datasets.DatasetDict({"a": saved, "b": saved}).save_to_disk(folder / "ab")


def write_checkpoints(folder: Path) -> None:
    """`ck`, and others that have a part of it changed."""
    whole = build_tiny_checkpoint("gemma3", folder / "ck")
    for name in ("incomplete", "lfs_tokenizer", "template", "module", "other", "shape", "half"):
        shutil.copytree(whole, folder / name)
    (folder / "incomplete/model.safetensors").rename(folder / "incomplete/model.safetensors.incomplete")
    (folder / "lfs_tokenizer/tokenizer.json").write_text(POINTER)
    (folder / "template/chat_template.jinja").write_text("{% for m in messages %}{{ m }")
    (folder / "other/config.json").write_text('{"model_type": "qwen3_vl"}')
    file = folder / "half/model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tensors = load_file(whole / "model.safetensors")
    save_file({f"module.{key}": value for key, value in tensors.items()}, folder / "module/model.safetensors")
    first = min(key for key, value in tensors.items() if value.ndim == 2)
    save_file(tensors | {first: tensors[first][1:].clone()}, folder / "shape/model.safetensors")
    (folder / "rank_0").mkdir()
    (folder / "rank_0/adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}')


@contextmanager
def world() -> Iterator[Path]:
    """The folder in which the commands are typed: `run` has trained, two small disks are full or read-only,
    and a third, on which one run's drops are written, has no room at all."""
    with tempfile.TemporaryDirectory(prefix="second_trial_") as name:
        folder = Path(name)
        write_rows(folder)
        write_checkpoints(folder)
        disks = [folder / "disk", folder / "frozen", folder / "crowded/drops"]
        mounted = []
        try:
            for disk in disks:
                disk.mkdir(parents=True)
                command = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)]
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    mounted.append(disk)
            if len(mounted) == len(disks):
                (disks[0] / "filler").write_bytes(bytes(8 << 10))
                subprocess.run(["mount", "-o", "remount,ro", disks[1]], check=True)
                fill(disks[2] / ".filler")
            made = typed({"train": "--run_dir=run"}, folder)
            assert made.returncode == 0, made.stderr
            yield folder
        finally:
            for disk in mounted:
                subprocess.run(["umount", disk], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as opened:
        try:
            while opened.write(bytes(1024)):
                pass
        except OSError:
            return


def typed(row: dict, folder: Path) -> subprocess.CompletedProcess:
    words = shlex.split(row.get("typed", ""))
    if "train" in row:
        words = ["train", *changed(GOOD, shlex.split(row["train"]), "")]
    shutil.rmtree(folder / "new", ignore_errors=True)
    options = {"cwd": folder, "HF_HOME": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "cache")}
    return run_program(COMMAND, *words, **options)


def line_of(row: dict, folder: Path) -> str:
    """A line of the page: what is said now. Raises AssertionError if it is not what the row says."""
    done = typed(row, folder)
    output = (done.stdout + done.stderr).replace(str(folder), "…")
    assert done.returncode == row.get("ends", 2), (row, done.returncode, output[-3000:])
    assert "Traceback" not in output and "This is a bug" not in output, output
    last = re.sub(r"\brank \d+, ", "rank N, ", output.splitlines()[-1])  # whichever spoke first
    if not done.returncode:
        found = re.search(row["says"], output)
        assert found, (row, output[-3000:])
        last = found[0] or "(it answers)"
    assert re.search(row["says"], last), (row, output[-3000:])
    return cells(
        row, f"`{last}`", "works" if not done.returncode else "refused" if done.returncode == 2 else "differs"
    )


def cells(row: dict, now: str, ends: str) -> str:
    texts = (row["row"], row["was"], ends, now)
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


@pytest.fixture(scope="module")
def folder():
    with world() as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("row", MADE, ids=lambda row: row["row"])
def test_each_row_has_its_new_last_line(row, folder):
    if any(disk in str(row) for disk in ("disk/", "frozen", "crowded")) and not (folder / "disk").is_mount():
        pytest.skip("nothing may be mounted here")
    assert line_of(row, folder) in PAGE.read_text(encoding="utf-8"), f"{PAGE}: run {__file__} --write"


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row["row"])
def test_what_needs_more_than_a_command_has_its_test(row):
    file, name = row["shown"].split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert cells(row, f"test: `{row['shown']}`", "named") in PAGE.read_text(encoding="utf-8")


def write_page() -> None:
    with world() as folder:
        now = {row["row"]: line_of(row, folder) for row in MADE}
    now |= {row["row"]: cells(row, f"test: `{row['shown']}`", "named") for row in SHOWN}
    PAGE.write_text(
        "# The mistakes of a second trial, and what is said of them now\n\n"
        "Of 172 mistakes that were made through the command line once more, what was said of these was poor\n"
        "or wrong. `python tests/test_second_trial.py --write` makes each of them and writes its last line\n"
        "here, or the line that tells that it is read now; the soak makes them all again and compares.\n\n"
        "| mistake | what was wrong | now | what is said now |\n| --- | --- | --- | --- |\n"
        + "".join(now[row["row"]] + "\n" for row in TABLE["rows"]),
        encoding="utf-8",
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_page()
    else:  # tries all rows and says which fail
        with world() as tried:
            for each in MADE:
                try:
                    print(line_of(each, tried), flush=True)
                except AssertionError as error:
                    print("FAILED", str(error).replace("\\n", "\n")[-1500:], flush=True)
