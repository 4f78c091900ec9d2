"""The files of one checkpoint: their sizes and checksums when saved, and whether they are still the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from megatron_vlm.files import open_file, read_text
from megatron_vlm.messages import printable

STATE = "state.json"
_PIECE = 4 << 20  # bytes read at a time
_TYPES = {"step": int, "layout": dict, "schedule": dict, "extra": dict, "ranks": list, "files": dict}


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
        _check_types(state, int(path.name.removeprefix("step_")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(path / STATE)} is not what was saved: {error}") from error
    if state.pop("checksum", None) != _checksum_of(json.dumps(state)):
        raise ValueError(f"{printable(path / STATE)} is not what was saved: its checksum differs")
    return state


def _check_types(state: Any, step: int) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__} and no mapping")
    for key, kind in _TYPES.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(f"{key} is {printable(state.get(key), 40)} and no {kind.__name__}")
    if state["step"] != step:
        raise ValueError(f"it is of step {state['step']}")
    for name, known in state["files"].items():
        plain = isinstance(known, list) and [type(value) for value in known] == [int, str]
        if os.path.basename(name) != name or not plain:
            raise ValueError(f"files: {printable(name)} is no file with its size and checksum")
    if len(state["ranks"]) != state["layout"].get("world"):
        raise ValueError(f"ranks: {len(state['ranks'])} entries, of {state['layout'].get('world')} ranks")
    of_rank = {"dp_rank", "rng", "loader"}
    if not all(isinstance(rank, dict) and of_rank <= rank.keys() for rank in state["ranks"]):
        raise ValueError("ranks: an entry lacks dp_rank, rng or loader")


def size_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which files are missing, extra, or of another size than state.json says; they are not read.

    Names that begin with a dot only count if they were saved: file systems and editors create such files.
    """
    there = {entry.name: entry for entry in os.scandir(path)}
    problems = []
    for name, (size, _) in sorted(files.items()):
        place = printable(path / name)
        if name not in there or not there[name].is_file():
            problems.append(f"{place} is missing")
        elif (now := there[name].stat().st_size) != size:
            problems.append(f"{place} has {now} bytes and had {size} when it was saved")
    extra = {name for name in there if not name.startswith(".")} - {*files, STATE}
    return problems + [f"{printable(path / name)} was not saved with it" for name in sorted(extra)]


def checksum_problems(path: Path, files: dict[str, list]) -> list[str]:
    """Which of the files do not hold what was saved; they are read whole."""
    problems = []
    for name in sorted(files):
        try:
            same = _size_and_checksum(path / name) == files[name]
        except OSError as error:
            problems.append(f"{printable(path / name)} cannot be read ({error.strerror})")
        else:
            if not same:
                problems.append(f"{printable(path / name)} is not what was saved: its checksum differs")
    return problems


def _size_and_checksum(path: Path, sync: bool = False) -> list:
    digest = xxhash.xxh3_64()
    size = 0
    piece = memoryview(bytearray(_PIECE))
    with open_file(path) as file:
        while read := file.readinto(piece):
            digest.update(piece[:read])
            size += read
        if sync:
            os.fsync(file.fileno())
    return [size, digest.hexdigest()]


def _checksum_of(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()
