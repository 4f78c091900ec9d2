"""A file of records as lines: other JSON is written as JSON Lines into the cache, once."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm.data.on_disk.descriptions import damaged, read_meta
from megatron_vlm.data.on_disk.fields import FIELDS
from megatron_vlm.data.on_disk.plain import in_cache, plain_file, table_of, tabular_kind
from megatron_vlm.files import open_file, open_to_write
from megatron_vlm.signatures import explain_file

FIRST_RECORDS = 1000  # among which the first valid ones lie
REPAIR = "write one JSON object on each line, in UTF-8"
TRIED = 100  # lines that tell whether lines are records


def lines_file(path: str | Path) -> Path:
    """The file itself if its lines are records, or the file in the cache that has its records as lines.

    Raises as `plain_file`, and ValueError that says what the file is, if it holds no records.
    """
    plain = plain_file(path)
    try:
        return plain if _is_lines(plain) else in_cache(plain, partial(_write_lines, plain))
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


def _write_lines(plain: Path, target: Path) -> None:
    with open_file(plain) as file, open_to_write(target, "xb") as lines:
        for record in _records_in(file.read().decode("utf-8-sig")):
            lines.write(json.dumps(record).encode() + b"\n")


def _records_in(text: str) -> list:
    """The records of a JSON text: of an array, of an object's only list of objects, or the text itself.

    Raises ValueError for what is not JSON, and for an object from which records cannot be taken.
    """
    if not text.lstrip().startswith(("[", "{")):
        line = repr(text[:60].partition("\n")[0])
        raise ValueError(f"its first line, {line}, is neither JSON nor a header of two columns or more")
    content = json.loads(text)
    if isinstance(content, list):
        return [content] if content and is_turn(content[0]) else content
    if content.keys() & set(FIELDS):
        return [content]
    lists = {name: value for name, value in content.items() if _is_records(value)}
    if len(lists) != 1:
        names = ", ".join(lists)
        raise ValueError(f"it is an object with {len(lists)} lists of records ({names}), and one is read")
    return next(iter(lists.values()))


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not is_turn(value[0])
