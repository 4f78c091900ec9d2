"""JSON and JSON Lines as tables: records are located once, and each is read when asked for."""

import hashlib
import json
import os
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.data.conversation.chatml import BadSample
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.lines import REPAIR, first_records, lines_file, record_places
from megatron_vlm.data.records.blends import Table
from megatron_vlm.data.records.columns import Columns
from megatron_vlm.files import open_file
from megatron_vlm.signatures import what_is

CHECKED_RECORDS = 1000  # the first ones: one must be there, and every mapped column must occur


class JsonTable(Table):
    """Records in JSON or JSON Lines. Keeps where each lies in the file, but not the records.

    Raises ValueError for JSON that is not valid, and if none of the first lines is a record. A single invalid
    line is a bad record.
    """

    def __init__(self, path: Path, root: Path, columns: Columns) -> None:
        self.path, self.root, self.columns = path, root, columns
        self._file = open_file(lines_file(path))
        self._version = _version(os.fstat(self._file.fileno()))
        self._numbers, self._starts, self._stops = (
            np.array(array("q", chain.from_iterable(record_places(self._file)))).reshape(-1, 3).T
        )
        self.identity = f"{path.resolve()} {_version(path.stat())} {root.resolve()} {columns}"
        present = {str(name) for record in first_records(path, CHECKED_RECORDS) for name in record}
        if not present:
            raise damaged(
                path, f"holds no record: not one of its first {CHECKED_RECORDS} is a JSON object", REPAIR
            )
        columns.check(sorted(present), str(path))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, index: int) -> tuple[dict, Path]:
        return self.columns(self._raw(index)), self.root

    def origin(self, index: int) -> tuple[str, int]:
        return str(self.path), int(self._numbers[index])

    def _raw(self, index: int) -> Any:
        start, stop = int(self._starts[index]), int(self._stops[index])
        text = os.pread(self._file.fileno(), stop - start, start)
        if _version(os.fstat(self._file.fileno())) != self._version:
            raise damaged(self.path, "was changed while it was read", "start again, and leave it as it is")
        try:
            return json.loads(text)
        except UnicodeDecodeError as error:
            raise BadSample("bad_json", f"{what_is(text) or error}") from error
        except (ValueError, RecursionError) as error:  # bad JSON, nested beyond reason
            raise BadSample("bad_json", str(error)) from error

    def content(self) -> str:
        with open_file(self.path) as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _version(stat: os.stat_result) -> str:
    """Changes when somebody writes into an open file, not when another takes its name."""
    return f"{stat.st_size} {stat.st_mtime_ns}"
