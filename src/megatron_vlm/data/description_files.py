"""Files that describe a dataset or hold its rows: only regular files are opened, and errors name the file."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vlm.files import KINDS

RESTORE = "restore the file or prepare the dataset again"


def damaged(path: Any, fact: str, remedy: str = RESTORE) -> ValueError:
    """The error for a file that cannot be used, in one form for all."""
    return ValueError(f"data: {path}: {' '.join(fact.split())}; {remedy}.")


def check_regular(path: Path, remedy: str = RESTORE) -> None:
    """Raises ValueError if `path` exists and is not a regular file: opening a pipe would wait without end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:  # a link to itself, a folder that may not be entered
        raise damaged(path, f"cannot be opened ({error.strerror})", remedy) from error
    if not stat.S_ISREG(mode):
        raise damaged(path, f"is {KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a file", remedy)


def read_mapping(path: Any, parse: Callable[[str], Any] = json.loads, remedy: str = RESTORE) -> dict:
    """The mapping that a description file holds; `path` is a Path or an EPath.

    Raises ValueError that names the file when it is not a regular file, is empty or cut short, or holds
    something other than a mapping.
    """
    local = path.local_path() if hasattr(path, "local_path") and path.is_local() else path
    if isinstance(local, Path):
        check_regular(local, remedy)
    try:
        with path.open("rb") as file:
            raw = file.read()
    except FileNotFoundError as error:
        raise damaged(path, "is missing", remedy) from error
    except OSError as error:
        raise damaged(path, f"cannot be read ({error})", remedy) from error
    if not raw.strip():
        raise damaged(path, "is empty", remedy)
    try:
        content = parse(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise damaged(path, f"is not valid ({error})", remedy) from error
    except RecursionError as error:
        raise damaged(path, "is nested too deep", remedy) from error
    if not isinstance(content, dict):
        raise damaged(path, f"holds a {type(content).__name__}, expected a mapping", remedy)
    return content


def check_fields(path: Any, content: dict, fields: dict[str, str], remedy: str = RESTORE) -> None:
    """Raises ValueError for a field that is present and not of its kind; FIELD_KINDS lists the kinds."""
    for name, kind in fields.items():
        if name in content and not FIELD_KINDS[kind](content[name]):
            raise damaged(path, f"{name} is no {kind}: {str(content[name])[:60]}", remedy)


def _is_mapping_of(value: Any, of: type) -> bool:
    return isinstance(value, dict) and all(type(key) is str and type(v) is of for key, v in value.items())


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FIELD_KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "mapping": lambda value: isinstance(value, dict),
    "mapping of numbers": lambda value: _is_mapping_of(value, int),
    "mapping of lists of text": lambda value: (
        isinstance(value, dict) and all(map(_is_list_of_text, value.values()))
    ),
    "list": lambda value: isinstance(value, list),
    "list of text": _is_list_of_text,
}
