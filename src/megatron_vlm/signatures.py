"""Explains a file that its library refused, by how it begins. None is refused for its first bytes."""

import re
from pathlib import Path

from megatron_vlm.files import open_file

START = 4096  # bytes that are enough
EXPLANATIONS = {
    rb"\Z": "an empty file; download or write it again",
    rb"\0{16}": "a file that begins with zeros; download it again: the download was cut",
    rb"version https://git-lfs": "a Git LFS pointer, not the file; run `git lfs pull` in that folder",
    rb"\s*<(!doctype|html|head|body|\?xml|error)": "an HTML or XML page; download the file itself again",
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff": "text in UTF-16 or UTF-32; save it as UTF-8",
    rb"\x80[\x02-\x05]|PK\x03\x04.{26}[^/]{1,99}/data\.pkl": (
        "a Python pickle, which can run any code and is not read; save it as safetensors"
    ),
}
_PATTERNS = [(re.compile(start, re.DOTALL | re.IGNORECASE), text) for start, text in EXPLANATIONS.items()]


def explain(start: bytes) -> str | None:
    """Return what content with these first bytes is and what to do, as `a …; do …`; None if unknown."""
    return next((text for pattern, text in _PATTERNS if pattern.match(start[:START])), None)


def explain_file(path: str | Path) -> str | None:
    """Return as `explain` for a file. Raise NotAFile and OSError as `files.open_file`."""
    with open_file(path) as file:
        return explain(file.read(START))
