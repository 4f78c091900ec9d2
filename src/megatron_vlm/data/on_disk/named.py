"""Media as records name them: paths in another form than the file's, and base64 without a head."""

import base64
import functools
import os
import unicodedata
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from megatron_vlm.signatures import FileKind, is_medium, what_is

SHORTEST_FILE = 100  # characters of base64
ADDRESS = FileKind("address", "an address", "download it and give its path")


def meant(name: str, root: Path) -> Path | None:
    """The only file under `root` that `name` can mean; None if there is none or are several. Its path differs
    only in slashes, case, how accents are written, spaces at its ends, and as an address (file://, %20)."""
    name = unquote(name.removeprefix("file://")).strip().replace("\\", "/")
    path = PurePosixPath(name)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return None
    paths = [root]
    for part in path.parts:
        paths = [folder / name for folder in paths for name in _names(folder).get(_form(part), ())]
    return paths[0] if len(paths) == 1 and paths[0].is_file() else None


@functools.lru_cache(maxsize=16)
def _names(folder: Path) -> dict[str, list[str]]:
    names = defaultdict(list)
    for name in os.listdir(folder) if folder.is_dir() else ():
        names[_form(name)].append(name)
    return names


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip().casefold()


def is_path(name: Any) -> bool:
    """Whether this is how a record names a file, and neither base64 nor a key of an LMDB."""
    if not isinstance(name, str) or name.startswith("data:") or "::" in name:
        return False
    return not is_base64(name)


def in_order(media: list, parts: list[tuple[Any, Any]]) -> bool:
    """Whether a record and its parts can name the same media in one order; the parts say a medium or None,
    and an index or None."""
    numbers = [number for _, number in parts if isinstance(number, int)]
    names = ({_file_name(item), _file_name(named)} for item, (named, _) in zip(media, parts, strict=False))
    return not media or (numbers == sorted(numbers) and all(len(pair - {None}) < 2 for pair in names))


def _file_name(medium: Any) -> str | None:
    path = medium.get("path") if isinstance(medium, dict) else medium
    return PurePosixPath(path.replace("\\", "/")).name if is_path(path) else None


def no_name(name: str) -> FileKind | None:
    """Names a text that stands where a path should, with what to do; None if it may be a path."""
    if "://" in name and not name.startswith("file://"):
        return ADDRESS
    return what_is(name.encode(errors="replace")) if name and "\0" not in name else None


def is_base64(text: str) -> bool:
    """Whether a text is an image or a video in base64, by its beginning."""
    try:
        return len(text) >= SHORTEST_FILE and is_medium(what_is(base64.b64decode(text[:64], validate=True)))
    except ValueError:
        return False
