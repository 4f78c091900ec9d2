"""Reads files that others name, only if they are regular: a pipe or a device could block without end.

Also reads the files to which a run adds a line per step, when the run resumes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable

MOST_BYTES = 1 << 31  # of an image or a video; a clip of an hour has half as many
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class NotAFile(ValueError):
    """The path leads to something that is not a regular file."""


def check_file(path: str | Path) -> None:
    """Raises NotAFile unless `path` is a regular file or a link to one, OSError if it does not exist."""
    _check_kind(path, os.stat(path))


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises NotAFile as `check_file`, OSError, and ValueError for a file of more than `most_bytes`.
    """
    check_file(path)  # before opening it: opening a device may start it
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        _check_kind(path, found)
        if found.st_size > most_bytes:
            raise ValueError(f"{path} has {found.st_size} bytes, more than {most_bytes}")
        return file.read(most_bytes)


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects, each with a `step`, of a file to which a run adds lines. A last line that was cut
    short is left out. Raises ConfigError that names any other bad line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ConfigError(
                    f"{printable(path)}: line {number} is not what a run wrote; take the line out, or move "
                    "the file away to go on without it."
                )
            yield row


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting, also if the file was replaced by a pipe after `check_file`."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_kind(path: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotAFile(f"{path} is {kind}, not a file")
