"""A file of records as lines: other JSON is written as JSON Lines into the cache, once."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm.data.on_disk.coco import coco_records
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.fields import FIELDS, PROMPTS, TURNS
from megatron_vlm.data.on_disk.meta import read_meta
from megatron_vlm.data.on_disk.plain import in_cache, plain_file, table_of, tabular_kind
from megatron_vlm.files import open_file
from megatron_vlm.messages import printable
from megatron_vlm.signatures import explain_file

FIRST_RECORDS = 1000  # among which the first valid ones lie
REPAIR = "write one JSON object on each line, in UTF-8"
TRIED = 100  # lines that tell whether lines are records
# What stands before a value: a comma, and the key in a mapping
_BEFORE = re.compile(r'[\s,]*+(?:("(?:[^"\\]++|\\.)*+")\s*+:\s*+)?', re.DOTALL)
_CLOSING = {"[": "]", "{": "}"}
Values = list[tuple[str | None, int, int]]  # key, start and stop of each


def lines_file(path: str | Path) -> Path:
    """The file itself if its lines are records, or the file in the cache that has its records as lines.

    Raises as `plain_file`, and ValueError that says what the file is, if it holds no records.
    """
    plain = plain_file(path)
    try:
        return plain if _is_lines(plain) else in_cache(plain, _write_lines)
    except (ValueError, RecursionError) as error:
        if explanation := explain_file(plain):
            raise ValueError(f"data: {path}: is {explanation}.") from error
        raise damaged(path, f"cannot be read as records ({error})", REPAIR) from error


def record_places(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Number, start and stop in bytes of each record in a file of `lines_file`. Numbers count lines from 0,
    blank ones too."""
    start = 0
    for number, line in enumerate(file):
        if line.strip():
            yield number, start, start + len(line)
        start += len(line)


def first_records(path: str | Path, most: int = 20) -> Iterator[dict]:
    """Yield the first valid records of a file of rows: none of parquet, Arrow or a meta file.

    Raises as `lines_file`.
    """
    plain = plain_file(path)
    if tabular_kind(plain) or read_meta(plain):
        return
    if table := table_of(plain):
        names, *rows = table[1]
        yield from (dict(zip(names, row, strict=False)) for row in rows[:most])
        return
    with open_file(lines_file(path)) as file:
        values = map(_value, islice(filter(bytes.strip, file), FIRST_RECORDS))
        yield from islice((value for value in values if isinstance(value, dict)), most)


def is_turn(value: Any) -> bool:
    """Whether an element of an array is a turn, so that the array is one conversation."""
    return isinstance(value, dict) and bool(
        value.keys() & {"role", "from"} and value.keys() & {"content", "value"}
    )


def _is_lines(path: Path) -> bool:
    """Whether at least half of the first lines are records. The only line of a file is read as other JSON."""
    with open_file(path) as file:
        lines = list(islice(filter(None, map(bytes.strip, file)), TRIED))
    return len(lines) > 1 and 2 * sum(isinstance(_value(line), dict) for line in lines) >= len(lines)


def _value(text: bytes) -> Any:
    """The content of a line, a list of turns as a record of them; None if it is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return {"messages": value} if isinstance(value, list) and value and is_turn(value[0]) else value


def _write_lines(plain: BinaryIO, lines: BinaryIO) -> None:
    text = plain.read().decode("utf-8-sig")
    if (records := coco_records(text)) is not None:
        lines.writelines(json.dumps(record).encode() + b"\n" for record in records)
        return
    for start, stop in _records_in(text):
        # no text in JSON holds an end of line as it is
        lines.write(text[start:stop].replace("\n", " ").replace("\r", " ").encode() + b"\n")


def _records_in(text: str) -> list[tuple[int, int]]:
    """Where the records of a JSON text stand: in an array, in an object's only array, or as the text itself.

    Raises ValueError for what is not JSON, and for an object from which records cannot be taken.
    """
    at = _BEFORE.match(text).end()
    values, end = _values_within(text, at)
    if _BEFORE.match(text, end).end() < len(text):
        line = text.count("\n", 0, end) + 1
        raise ValueError(f"there is more after the JSON value that ends in line {line}")
    if text[at] == "[":
        return [(at, end)] if _holds_turn(text, values) else [value[1:] for value in values]
    return _in_object(text, values) or [(at, end)]


def _in_object(text: str, values: Values) -> list[tuple[int, int]]:
    """Where the records stand in the only array of an object; empty for an object that is a record."""
    starts = {json.loads(key): start for key, start, _ in values}
    if starts.keys() & set(FIELDS):
        turns = [start for name, start in starts.items() if name in (*TURNS, *PROMPTS)]
        if len(starts) > 1 and all(text[start] == "[" for start in starts.values()) and turns:
            elements = _values_within(text, turns[0])[0]
            if elements and text[elements[0][1]] != "{":  # the turns of one record would be objects
                raise ValueError("it holds a list for each column; write an object for each record")
        return []
    arrays = {name: _values_within(text, start)[0] for name, start in starts.items() if text[start] == "["}
    lists = {
        name: array
        for name, array in arrays.items()
        if array and text[array[0][1]] == "{" and not _holds_turn(text, array)
    }
    if len(lists) > 1:
        raise ValueError(
            f"it holds several lists of records, {printable(', '.join(lists))}; write each to its own file"
        )
    if not lists and values and all(text[start] == "{" for _, start, _ in values):
        raise ValueError("it holds an object of objects; write these as a list")
    return [place[1:] for array in lists.values() for place in array]


def _holds_turn(text: str, values: Values) -> bool:
    return bool(values) and is_turn(json.loads(text[slice(*values[0][1:])]))


def _values_within(text: str, at: int) -> tuple[Values, int]:
    """The values of the array or object that begins at a place, and where it ends. Each is parsed but not
    kept, so that a large file fits into memory."""
    if text[at : at + 1] not in _CLOSING:
        line = printable(repr(text[at : at + 60].partition("\n")[0]))
        raise ValueError(f"its first line, {line}, is neither JSON nor a header of two columns or more")
    decoder, values, end = json.JSONDecoder(), [], at + 1
    while (before := _BEFORE.match(text, end)).end() < len(text) and text[before.end()] not in "]}":
        end = decoder.raw_decode(text, before.end())[1]
        values.append((before[1], before.end(), end))
    if text[before.end() : before.end() + 1] != _CLOSING[text[at]]:
        raise json.JSONDecodeError(f"Expecting ',' or '{_CLOSING[text[at]]}'", text, before.end())
    return values, before.end() + 1
