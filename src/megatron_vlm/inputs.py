"""Inputs of a user: what was being read at an error, values of a wrong type, files of a wrong kind."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_vlm.files import open_file, read_text
from megatron_vlm.messages import shorten

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


def attribute_errors_to(source: str) -> Callable[[Callable], Callable]:
    """Decorate a function that reads an input: an error from inside is then about that, and no bug.

    `source` is an argument of the function or an attribute of one (`self.path`), or else words that name it.
    The innermost of such functions knows best. `job.errors.explain` reads the mark.
    """
    name, _, attributes = source.partition(".")

    def decorated(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def reads(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if getattr(error, "reading", None) is None:
                    value = signature.bind(*args, **kwargs).arguments.get(name, source)
                    error.reading = attrgetter(attributes)(value) if attributes else value
                raise

        return reads

    return decorated


def check_number(name: str, value: Any, holds: Callable[[Any], bool], expected: str) -> None:
    """Raise ValueError, which says what is `expected`, unless `value` is a number that passes `holds`."""
    try:
        is_right = holds(value)
    except TypeError:  # a text, None
        is_right = False
    if not is_right:
        raise ValueError(f"{name} is {value!r}; give {expected}.")


def odd_fields(
    content: Mapping[str, Any], types: Mapping[str, Any], positive: Iterable[str] = ()
) -> Iterator[str]:
    """Yield a message for each field that is there and not of its type, such as `dict[str, int | None]`.

    One of the `positive` fields may neither be nor, as a list, hold a number of zero or less.
    """
    for name in positive:
        value = content.get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not number > 0:
                yield f"{name} is {shorten(repr(value))}, expected more than 0"
                break
    for name in filter(content.__contains__, types):
        hint = types[name]
        try:
            TypeAdapter(hint).validate_python(content[name], strict=True)
        except ValidationError:
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            yield f"{name} is {shorten(repr(content[name]))}, expected {expected}"
