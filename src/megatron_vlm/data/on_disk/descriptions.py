"""Files that describe a dataset or hold its rows: only regular files are opened, and errors name the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vlm.files import open_file, read_file
from megatron_vlm.messages import odd_fields

RESTORE = "restore the file or prepare the dataset again"
# -- a meta file in LLaMA-Factory's format
META_SOURCES = ("file_name", "hf_hub_url")
META_NUMBERS = ("sample_ratio", "num_samples")
META_FIELDS = {
    **dict.fromkeys((*META_SOURCES, "media_dir", "split", "subset"), str),
    **dict.fromkeys(("columns", "tags"), dict),
}
META_KEYS = {*META_FIELDS, *META_NUMBERS, "formatting", "ranking"}  # the last two are not read: records tell
LARGEST_META = 1 << 24  # bytes


def damaged(path: Any, fact: str, remedy: str = RESTORE) -> ValueError:
    """The error for a file that cannot be used, in one form for all."""
    return ValueError(f"data: {path}: {' '.join(fact.split())}; {remedy}.")


def read_mapping(path: Any, parse: Callable[[str], Any] = json.loads, remedy: str = RESTORE) -> dict:
    """The mapping that a description file holds; `path` is a Path or an EPath.

    Raises ValueError that names the file if it is not a regular file or does not hold a mapping.
    """
    local = path.local_path() if hasattr(path, "local_path") and path.is_local() else path
    try:
        with open_file(local) if isinstance(local, Path) else path.open("rb") as file:
            content = parse(file.read().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise damaged(path, "is missing", remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"cannot be read ({error})", remedy) from error
    if not isinstance(content, dict):
        raise damaged(path, f"holds a {type(content).__name__}, expected a mapping", remedy)
    return content


def check_fields(path: Any, content: dict, types: dict[str, Any], remedy: str = RESTORE) -> None:
    """Raises ValueError for a field that is present and not of its type, such as `dict[str, list[str]]`."""
    for problem in odd_fields(content, types):
        raise damaged(path, problem, remedy)


def read_meta(path: Path) -> dict[str, dict] | None:
    """Return the entries of a meta file, or None for a file that is something else."""
    try:
        content = json.loads(read_file(path, LARGEST_META))
    except (ValueError, RecursionError):  # JSON Lines, or damaged: who reads it line by line will see
        return None
    is_meta = isinstance(content, dict) and content and all(isinstance(e, dict) for e in content.values())
    entries = content.values() if is_meta else ()  # or {id: record}
    named = any({*META_SOURCES} & entry.keys() or entry.keys() <= META_KEYS for entry in entries)
    return content if named else None
