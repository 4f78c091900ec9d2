"""JSON Lines and JSON arrays as tables: records are located once, and each is read when asked for."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.description_files import check_regular, damaged
from megatron_vlm.data.records.blends import Whole
from megatron_vlm.data.records.columns import RecordLayout

CHECKED_RECORDS = 1000  # the first ones: every mapped column must occur, and at least one line must be JSON
REPAIR = "repair it or convert it to JSON Lines"


class JsonTable(Whole):
    """JSON Lines, or a JSON array. Keeps where each record lies in the file, but not the records.

    Raises ValueError for an array that is not valid JSON, and if no line is valid JSON. A single invalid line
    is a bad record.
    """

    def __init__(self, path: Path, root: Path, layout: RecordLayout, lines: bool) -> None:
        check_regular(path)
        self.path, self.root, self.layout = path, root, layout
        found = np.array(array("q", _lines(path) if lines else _elements(path))).reshape(-1, 3)
        self._numbers, self._starts, self._stops = found.T
        self._file = open(path, "rb")
        stat = path.stat()
        self.identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {root.resolve()} {layout}"
        if (columns := self._columns()) is None:
            raise damaged(
                path, f"holds no record: not one of its first {CHECKED_RECORDS} is a JSON object", REPAIR
            )
        if layout.columns:
            layout.check_columns(columns, str(path))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, index: int) -> tuple[dict, Path]:
        return self.layout(self._raw(index)), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return str(self.path), int(self._numbers[index])

    def _raw(self, index: int) -> Any:
        start, stop = int(self._starts[index]), int(self._stops[index])
        try:
            return json.loads(os.pread(self._file.fileno(), stop - start, start))
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, nested beyond reason
            raise BadSample("bad_json", str(error)) from error

    def content(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:16]

    def _columns(self) -> list[str] | None:
        """The keys of the first records; None if none of them is a record."""
        seen: set[str] | None = None
        for index in range(min(len(self), CHECKED_RECORDS)):
            try:
                record = self._raw(index)
            except BadSample:
                continue
            if isinstance(record[0] if record and isinstance(record, list) else record, dict):
                seen = (seen or set()).union(record if isinstance(record, dict) else ())
        return None if seen is None else sorted(seen)


def _lines(path: Path) -> Iterator[int]:
    """Number, start and stop of each line that is not blank, as one flat sequence."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                yield from (number, start, start + len(line))
            start += len(line)


def _elements(path: Path) -> Iterator[int]:
    """Number, start and stop in bytes of each element of a JSON array, as one flat sequence."""
    try:
        text = path.read_bytes().decode()
        bom = text.startswith("\ufeff")
        elements = list(_element_spans(text, int(bom)))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not valid JSON ({error})", REPAIR) from error
    at, read = 0, 0
    for number, (start, stop) in enumerate(elements):
        at += len(text[read:start].encode())
        size = len(text[start:stop].encode())
        yield from (number, at, at + size)
        at, read = at + size, stop


def _element_spans(text: str, at: int) -> Iterator[tuple[int, int]]:
    """The spans of an array's elements. Each element is parsed but not kept."""
    decoder, space = json.JSONDecoder(), json.decoder.WHITESPACE
    at = space.match(text, at).end()
    if text[at : at + 1] != "[":
        raise ValueError("it holds no array of records")
    at = space.match(text, at + 1).end()
    if text[at : at + 1] != "]":
        while True:
            stop = decoder.raw_decode(text, at)[1]
            yield at, stop
            at = space.match(text, stop).end()
            if text[at : at + 1] != ",":
                break
            at = space.match(text, at + 1).end()
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("Extra data", text, at + 1)
