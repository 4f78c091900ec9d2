"""Media as records name them: paths, and base64 with and without a head."""

import base64
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

SHORTEST_FILE = 100  # characters of base64
# How the images and videos begin that are read: they tell base64 without a head from a path.
MEDIA_STARTS = re.compile(
    rb"\x89PNG|\xff\xd8\xff|BM....\0\0\0\0|GIF8|RIFF....(WEBP|AVI )|II\*\0|MM\0\*|....ftyp|\x1a\x45\xdf\xa3",
    re.DOTALL,
)


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


def is_address(name: str) -> bool:
    """Whether a text that stands where a path should is an address."""
    return re.match(r"[a-z][a-z0-9+.-]*://", name, re.IGNORECASE) is not None


def is_base64(text: str) -> bool:
    """Whether a text is an image or a video in base64, by its beginning."""
    try:
        start = base64.b64decode(text[:64], validate=True) if len(text) >= SHORTEST_FILE else b""
        return MEDIA_STARTS.match(start) is not None
    except ValueError:
        return False


def describe_outside(name: str, path: Path, root: Path) -> str:
    """Say that a name leads to a `path` outside of the media root, and which setting allows it."""
    start = str(path).removesuffix(f"/{os.path.normpath(name)}")
    if os.path.isabs(name) or start == str(path):
        remedy = "set data.media_dir=/ and give absolute paths, or copy the files"
    else:
        remedy = f"set data.media_dir={start or '/'}, or copy the files"
    leads = "lies" if str(path) == name else f"leads to {path},"
    return f"{leads} outside of {root}; {remedy}"
