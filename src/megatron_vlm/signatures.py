"""Explains a file that its library refused, by how it begins. None is refused for its first bytes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.files import open_file, read_text

START = 4096  # bytes that are enough
EXPLANATIONS = {
    rb"\Z": "an empty file; download or write it again",
    rb"version https://git-lfs": "a Git LFS pointer, not the file; run `git lfs pull` in that folder",
    rb"\s*<(!doctype|html|head|body|\?xml|error)": "an HTML or XML page; download the file itself again",
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff": "text in UTF-16 or UTF-32; save it as UTF-8",
}
_PATTERNS = [(re.compile(start, re.DOTALL | re.IGNORECASE), text) for start, text in EXPLANATIONS.items()]


def explain(start: bytes) -> str | None:
    """Return what content with these first bytes is and what to do, as `a …; do …`; None if unknown."""
    return next((text for pattern, text in _PATTERNS if pattern.match(start[:START])), None)


def explain_file(path: str | Path) -> str | None:
    """Return as `explain` for a file. Raise NotAFile and OSError as `files.open_file`."""
    with open_file(path) as file:
        return explain(file.read(START))


def unreadable_files(folder: Path) -> Iterator[str]:
    """Yield a line for each text in a checkpoint's folder that is a Git LFS pointer, a web page or empty."""
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt") and (reason := explain_file(file)):
            yield f"{file} is {reason}."


def unparsable_files(folder: Path) -> Iterator[str]:
    """Yield a line for each JSON file in a checkpoint's folder that holds no object."""
    for file in sorted(folder.glob("*.json")):
        try:
            reason = "" if isinstance(json.loads(read_text(file)), dict) else "a list or a number"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        if reason:
            yield f"{file} is no JSON object ({reason}); download it again."
