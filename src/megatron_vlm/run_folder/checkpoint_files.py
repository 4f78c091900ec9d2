"""The files of one checkpoint: their sizes and checksums when saved, and whether they are still the same."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from megatron_vlm.files import open_file, read_text

STATE = "state.json"


def checksums(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """{name: [bytes, XXH3 as hexadecimal]} of files that were just written; they are on disk afterwards."""
    return {name: _size_and_checksum(folder / name, sync=True) for name in names}


def state_text(state: dict[str, Any]) -> str:
    """The text that `read_state` reads, with its own checksum. `state["files"]` comes from `checksums`."""
    return json.dumps({**state, "checksum": _checksum_of(json.dumps(state))})


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Raises ValueError that names the file and what is wrong with it."""
    try:
        state = json.loads(read_text(path / STATE))
        if not isinstance(state, dict) or state.pop("checksum", None) != _checksum_of(json.dumps(state)):
            raise ValueError("its checksum differs")
        if state["step"] != int(path.stem.removeprefix("step_")):
            raise ValueError(f"it is of step {state['step']}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / STATE} is not what was saved: {error}") from error
    return state


def size_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which files are missing, extra, or of another size than state.json says; they are not read.

    Names that begin with a dot only count if they were saved: file systems and editors create such files.
    """
    there = {entry.name: entry for entry in os.scandir(path)}
    problems = []
    for name, (size, _) in sorted(files.items()):
        place = path / name
        if name not in there or not there[name].is_file():
            problems.append(f"{place} is missing")
        elif (now := there[name].stat().st_size) != size:
            problems.append(f"{place} has {now} bytes and had {size} when it was saved")
    extra = {name for name in there if not name.startswith(".")} - {*files, STATE}
    return problems + [f"{path / name} was not saved with it" for name in sorted(extra)]


def checksum_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which of the files do not hold what was saved; they are read whole."""
    problems = []
    for name in sorted(files):
        try:
            same = _size_and_checksum(path / name) == files[name]
        except OSError as error:
            problems.append(f"{path / name} cannot be read ({error.strerror})")
        else:
            if not same:
                problems.append(f"{path / name} is not what was saved: its checksum differs")
    return problems


def _size_and_checksum(path: Path, sync: bool = False) -> list:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        if sync:
            os.fsync(file.fileno())
        return [file.tell(), digest.hexdigest()]


def _checksum_of(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()
