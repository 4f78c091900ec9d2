"""A file of records as JSON Lines: other JSON is written as lines into the cache, once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm.data.on_disk.plain import in_cache, plain_file, table_of
from megatron_vlm.files import open_file
from megatron_vlm.signatures import what_file, what_is

FIRST_LINES = 1000  # in which the first records lie
TRIED = 100  # lines that tell whether lines are records
WRAPPER = '"data"'  # {"data": [records]}
# What stands before a value: a comma, and the key in a mapping
_BEFORE = re.compile(r'[\s,]*+(?:("(?:[^"\\]++|\\.)*+")\s*+:\s*+)?', re.DOTALL)
_CLOSING = {"[": "]", "{": "}"}
Values = list[tuple[str | None, int, int]]  # key, start and stop of each


def lines_file(path: str | Path) -> Path:
    """The file itself if each line is a record, or the file in the cache that has its records as lines.

    Records are also the elements of an array, also of the `data` of a mapping; the values of a mapping of
    records; and JSON values one after another. Raises as `plain_file`, and ValueError for what is not JSON.
    """
    plain = plain_file(path)
    try:
        return plain if _is_lines(plain) else in_cache(plain, _write_lines)
    except (ValueError, RecursionError) as error:
        repair = "repair it or convert it to JSON Lines"
        raise ValueError(f"data: {path}: is not valid JSON ({error}); {repair}.") from error


def first_records(path: str | Path, most: int = 20) -> Iterator[dict]:
    """The first valid records of a file of rows; none of parquet and Arrow. Raises as `lines_file`."""
    plain = plain_file(path)
    if what_file(plain) is not None:
        return
    if table := table_of(plain):
        names, *rows = table[1]
        yield from (dict(zip(names, row, strict=True)) for row in rows[:most])
        return
    with open_file(lines_file(path)) as file:
        records = (record for line in islice(file, FIRST_LINES) if (record := _record(line)) is not None)
        yield from islice(records, most)


def _is_lines(path: Path) -> bool:
    """Whether at least half of the first lines are records. The only line of a file is read as other JSON."""
    with open_file(path) as file:
        found = [_record(line) is not None for line in islice(filter(bytes.strip, file), TRIED)]
    return len(found) > 1 and 2 * sum(found) >= len(found)


def _record(line: bytes) -> dict | None:
    """The content of a line, if it is a record or a list of turns."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    value = {"messages": value} if isinstance(value, list) and value and is_turn(value[0]) else value
    return value if isinstance(value, dict) else None


def _write_lines(plain: BinaryIO, lines: BinaryIO) -> None:
    content = plain.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(str(what_is(content[error.start :]) or error)) from error
    del content
    for _, start, stop in _records(text):
        # no text in JSON holds an end of line as it is
        lines.write(text[start:stop].replace("\n", " ").replace("\r", " ").encode() + b"\n")


def _records(text: str) -> Values:
    """Where the records of a JSON text stand."""
    first = _BEFORE.match(text).end()
    if text[first : first + 1] not in ("[", "{"):
        raise json.JSONDecodeError("Expecting [ or {", text, first)
    inside, end = _values(text, first + 1)
    if text[end : end + 1] != _CLOSING[text[first]]:
        raise json.JSONDecodeError(f"Expecting ',' or '{_CLOSING[text[first]]}'", text, end)
    others, stop = _values(text, end + 1)
    if stop < len(text) or (others and text[first] == "["):
        raise json.JSONDecodeError("Extra data", text, end + 1)
    all_of_it = (None, first, end + 1)
    if others:
        return [all_of_it, *others]
    if text[first] == "[":
        return [all_of_it] if inside and is_turn(json.loads(text[slice(*inside[0][1:])])) else inside
    if inside and all(text[start] == "{" for _, start, _ in inside):
        return inside
    nested = [(key, start) for key, start, _ in inside if text[start] in "[{"]
    if [key for key, _ in nested] == [WRAPPER] and text[nested[0][1]] == "[":
        return _values(text, nested[0][1] + 1)[0]
    return [all_of_it]


def _values(text: str, at: int) -> tuple[Values, int]:
    """The values up to the end of their array, of their mapping or of the text, and where that is. Each is
    parsed but not kept, so that a large file fits into memory."""
    decoder, values = json.JSONDecoder(), []
    while (before := _BEFORE.match(text, at)).end() < len(text) and text[before.end()] not in "]}":
        at = decoder.raw_decode(text, before.end())[1]
        values.append((before[1], before.end(), at))
    return values, before.end()


def is_turn(value: Any) -> bool:
    """Whether an element of an array is a turn, so that the array is one conversation."""
    return isinstance(value, dict) and bool(
        value.keys() & {"role", "from"} and value.keys() & {"content", "value"}
    )
