"""The folder of an evaluation, to which answers are added as they come.

settings.json   what decides the answers; another evaluation is refused
answers.jsonl   one line for each question, in order
scores.json     the scores, and each answer's own
answers.html    the worst answers, with their images
lock            held by the evaluation while it goes on
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm.config import ConfigError
from megatron_vlm.files import naming, open_to_write, read_file, read_text, write_whole
from megatron_vlm.messages import listed, odd_fields, printable
from megatron_vlm.run_folder import lock

MOST_BYTES = 1 << 34
# the fields of a line of answers.jsonl, which has either `problem` or the other three beside its key
ANSWER = {"key": str, "question": str, "answer": str, "references": list[str], "problem": str}


def check_folder(folder: str | Path) -> None:
    """Raises ConfigError unless the folder is new, empty, or one of an evaluation."""
    folder = Path(folder)
    own = {"errors", lock.FILE} if lock.is_there(folder) else set()
    inside = set(os.listdir(folder)) - own if folder.is_dir() else set()
    if (folder.exists() and not folder.is_dir()) or (inside and "settings.json" not in inside):
        raise ConfigError(
            f"--output: {printable(folder)} holds no evaluation; give a new or an empty folder."
        )


def claim(folder: str | Path) -> BinaryIO:
    """Makes the folder, and holds its lock until that is closed or the process ends. Raises ConfigError if
    another evaluation holds it."""
    with naming(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return lock.take(folder, whose=lock.OF_AN_EVALUATION)


def begin(folder: str | Path, settings: Mapping[str, Any]) -> int:
    """Begins in the folder, or goes on in it; returns how many answers are there. A last line that a kill cut
    short goes. Raises ConfigError if its answers were made with other settings."""
    folder = Path(folder)
    kept = folder / "settings.json"
    file = folder / "answers.jsonl"
    settings = json.loads(json.dumps(settings))
    if kept.exists():
        theirs = _object_of(read_text(kept), folder, "settings.json")
        different = [name for name in {**theirs, **settings} if theirs.get(name) != settings.get(name)]
        if different:
            raise ConfigError(
                f"--output: {printable(folder)} has the answers of another evaluation, which differs in "
                f"{listed(different, 5)}; give another folder, or remove it."
            )
    write_whole(kept, json.dumps(settings, indent=1) + "\n")
    if not file.exists():
        return 0
    content = read_file(file, MOST_BYTES)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        write_whole(file, content[:whole])
    return content.count(b"\n")


def append(folder: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds a line for each record; another process then sees them."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with naming(Path(folder)), open_to_write(Path(folder, "answers.jsonl"), append=True) as file:
        file.write(lines.encode("utf-8", "backslashreplace"))


def read_answers(folder: str | Path) -> list[dict[str, Any]]:
    """All records, in order. Raises ConfigError that names a line that is none."""
    lines = read_file(Path(folder, "answers.jsonl"), MOST_BYTES).splitlines()
    return [_answer_of(line, folder, f"answers.jsonl: line {n}") for n, line in enumerate(lines, 1)]


def _answer_of(line: bytes, folder: str | Path, place: str) -> dict[str, Any]:
    record = _object_of(line, folder, place)
    names = ("key", "problem") if "problem" in record else ("key", "question", "answer", "references")
    if not record.keys() >= {*names} or any(odd_fields(record, {name: ANSWER[name] for name in names})):
        raise ConfigError(_not_ours(folder, place))
    return record


def _object_of(text: str | bytes, folder: str | Path, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(_not_ours(folder, place))
    return found


def _not_ours(folder: str | Path, place: str) -> str:
    return f"{printable(folder)}/{place} is not what an evaluation wrote; remove the folder, or give another."
