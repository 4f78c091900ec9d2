"""Errors about the files of a dataset: what a library says of one, with its path and what to do."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_vlm.files import NotAFile, open_file
from megatron_vlm.inputs import explain_file
from megatron_vlm.stores import StoreError

RESTORE = "restore the file or prepare the dataset again"
CACHE = "make room there, or set HF_HOME to a folder that you may write to"
LONGEST_REASON = 300  # characters of what a library says


class DamagedData(ValueError):
    """A file of a dataset cannot be used; the message names it."""


def damaged(path: Any, fact: str, remedy: str = RESTORE) -> DamagedData:
    """Return the error for a file that cannot be used, in one form for all."""
    return DamagedData(f"data: {path}: {' '.join(fact.split())}; {remedy}.")


@contextmanager
def reading_data(path: Any, remedy: str = RESTORE) -> Iterator[None]:
    """Add the path and what to do to whatever a library raises when it reads a dataset.

    Errors that name their file stay as they are. Raises DamagedData.
    """
    try:
        yield
    except (DamagedData, NotAFile, MemoryError, StoreError):
        raise
    except Exception as error:  # noqa: BLE001  libraries raise what they like
        cause: BaseException = error
        while cause.__cause__ is not None:  # `datasets` wraps it in general words
            cause = cause.__cause__
        place = None if isinstance(cause, FileNotFoundError) else getattr(cause, "filename", None)
        if isinstance(cause, OSError) and place and not str(place).startswith(str(path)):  # of the cache
            raise damaged(place, f"cannot be used ({cause.strerror})", CACHE) from error
        if isinstance(path, Path) and path.is_file() and (kind := explain_file(path)):
            raise DamagedData(f"data: {path}: is {kind}.") from error
        reason = str(cause).strip()[:LONGEST_REASON] or type(cause).__name__
        raise damaged(path, f"cannot be read ({reason})", remedy) from error


def read_mapping(path: Any, parse: Callable[[str], Any] = json.loads) -> dict:
    """Return the mapping that a description file holds; `path` is a Path or an EPath.

    Raises ValueError that names the file if it is not a regular file or does not hold a mapping.
    """
    local = path.local_path() if hasattr(path, "local_path") and path.is_local() else path
    with reading_data(path), open_file(local) if isinstance(local, Path) else path.open("rb") as file:
        content = parse(file.read().decode("utf-8-sig"))
    if not isinstance(content, dict):
        raise damaged(path, f"holds a {type(content).__name__}, expected a mapping")
    return content
