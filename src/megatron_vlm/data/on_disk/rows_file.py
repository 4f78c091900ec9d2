"""A file of records, whatever it is packed in. JSON Lines are read where they lie; other JSON and tables are
written as JSON Lines into the cache of `datasets`, once for each version of the file.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatron_vlm import stores
from megatron_vlm.data.on_disk.descriptions import reading_data
from megatron_vlm.data.on_disk.fields import FIELDS
from megatron_vlm.files import MOST_TEXT, open_file, open_to_write

REPAIR = "write one JSON object on each line, in UTF-8"
COPIED_AT_ONCE = 1 << 20  # bytes
START_BYTES = 16  # of a file; packed and tabular files begin with bytes that no text has
TABULAR_STARTS = {
    rb"PAR1[\0-\x08\x0e-\x1f]": "parquet",
    rb"ARROW1\0\0": "arrow",
    rb"\xff\xff\xff\xff..\0\0": "arrow",
}
LINES_LOOKED_AT = 100  # that tell whether lines are records
COLUMN_NAME = re.compile(r"[\w .:/-]{1,64}")


def on_disk(path: str | Path) -> Path:
    """Return the file itself; of one in a store, the copy of its version in the cache. Raise StoreError."""
    if not stores.is_store(path):
        return Path(path)
    with stores.at(path) as (client, name):
        info = client.info(name)
        if info.type != "file":
            raise stores.NotThere(f"data: {path} is a folder; give the files in it, as a list.")
        key = f"{path} {info.content_length} {info.etag or info.last_modified}"
        return _in_cache(key, Path(name).name, lambda target: client.download_file(name, str(target)))


def unpacked(path: str | Path) -> Path:
    """Return the file itself, or the file in the cache that has its content.

    Raises NotAFile and OSError as `files.open_file`, ValueError that names a file that cannot be unpacked.
    """
    path = Path(path)
    opener = _by_first_bytes(path, PACKINGS)
    if opener is None:
        return path

    def unpack(target: Path) -> None:
        with open_file(path) as file, opener(file) as content, open_to_write(target, "xb") as plain:
            plain.writelines(iter(partial(content.read, COPIED_AT_ONCE), b""))

    with reading_data(path, "unpack it yourself, or download it again"):
        return _in_cache(_version(path), "rows", unpack)


def tabular_kind(plain: Path) -> str | None:
    """Return `parquet` or `arrow` for a file that begins as one; None for text."""
    return _by_first_bytes(plain, TABULAR_STARTS)


def lines_file(path: str | Path, as_object: Callable[[list[tuple[str, Any]]], dict]) -> Path:
    """Return the file itself if its lines are records, or the file in the cache that has them as lines.

    `as_object` makes an object of JSON from its keys and values.

    Raises as `unpacked`, and ValueError that names a file without records.
    """
    plain = unpacked(path)
    with reading_data(path, REPAIR):
        if _is_lines(plain):
            return plain
        return _in_cache(_version(plain), "rows", partial(_write_lines, plain, as_object))


def record_places(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop in bytes of each record in a file of `lines_file`.

    Numbers count lines from 0, blank ones too.
    """
    start = 0
    for number, line in enumerate(file):
        if line.strip():
            yield number, start, start + len(line)
        start += len(line)


def _in_cache(key: str, name: str, make: Callable[[Path], None]) -> Path:
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE, "unpacked", hashlib.sha256(key.encode()).hexdigest()[:24])
    return stores.made_once(folder, lambda aside: make(aside / name)) / name


def _version(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


# -- what a file is


def _by_first_bytes(path: Path, kinds: dict[bytes, Any]) -> Any:
    with open_file(path) as file:
        start = file.read(START_BYTES)
    return next((kind for magic, kind in kinds.items() if re.match(magic, start, re.DOTALL)), None)


def _open_zstd(file: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.input_stream(file, compression="zstd")


def _open_zip(file: BinaryIO) -> Any:
    """Return the only file of a zip. macOS adds a folder of its own, and files that begin with a dot."""
    archive = zipfile.ZipFile(file)
    paths = [PurePosixPath(name) for name in archive.namelist() if not name.endswith("/")]
    names = [str(path) for path in paths if path.parts[0] != "__MACOSX" and path.name[0] != "."]
    if len(names) != 1:
        raise ValueError(f"it holds {len(names)} files, and one is read; save an Excel table as CSV")
    return archive.open(names[0])


PACKINGS = {  # how a packed file begins -> what opens it
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
    rb"\x28\xb5\x2f\xfd": _open_zstd,
    rb"PK\x03\x04": _open_zip,
}


def _is_lines(path: Path) -> bool:
    """Return whether at least half of the first lines are records. An only line is read as other JSON."""
    with open_file(path) as file:
        lines = list(islice(filter(None, map(bytes.strip, file)), LINES_LOOKED_AT))
    return len(lines) > 1 and 2 * sum(map(_is_record, lines)) >= len(lines)


def _is_record(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or is_conversation(value)


def is_conversation(value: Any) -> bool:
    """Return whether a list is one conversation, and not a list of records."""
    turn = value[0] if isinstance(value, list) and value else None
    return isinstance(turn, dict) and bool(
        turn.keys() & {"role", "from"} and turn.keys() & {"content", "value"}
    )


# -- other text as JSON Lines


def _write_lines(plain: Path, as_object: Callable, target: Path) -> None:
    with open_file(plain) as file, open_to_write(target, "xb") as lines:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        is_json = text.read(START_BYTES).lstrip()[:1] in ("[", "{", "")
        text.seek(0)
        for record in _json_records(text.read(), as_object) if is_json else _table_records(text):
            lines.write(json.dumps(record).encode() + b"\n")


def _json_records(text: str, as_object: Callable) -> list:
    """Return the records of an array, of an object's only list of objects, or the object as a record.

    Raises ValueError for what is not JSON, and for an object from which records cannot be taken.
    """
    content = json.loads(text, object_pairs_hook=as_object)
    if isinstance(content, list):
        return [content] if is_conversation(content) else content
    if content.keys() & set(FIELDS):
        return [content]
    lists = {name: value for name, value in content.items() if _is_records(value)}
    if len(lists) != 1:
        names = ", ".join(lists)
        raise ValueError(f"it is an object with {len(lists)} lists of records ({names}), and one is read")
    return next(iter(lists.values()))


def _is_records(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return is_list and not is_conversation(value)


def _table_records(lines: Iterable[str]) -> Iterator[dict]:
    """Yield the rows of a text with a header, such as CSV. All values are text.

    Raises ValueError for a text without a header, and for a row with more values than the header. csv.Error
    tells of a quote that is not closed.
    """
    lines = iter(lines)
    header = next(lines)
    delimiter = max("\t,;|", key=header.count)
    csv.field_size_limit(MOST_TEXT)  # images in base64
    names = next(csv.reader([header], delimiter=delimiter))
    names[0] = names[0] or "Unnamed: 0"  # an index that pandas wrote, as pandas calls it when it reads it
    if len(set(names)) < 2 or len(set(names)) < len(names) or not all(map(COLUMN_NAME.fullmatch, names)):
        line = repr(header[:60].rstrip())
        raise ValueError(f"its first line, {line}, is neither JSON nor a header of two columns or more")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for row in filter(None, rows):
            if len(row) > len(names):
                raise csv.Error(f"{len(row)} values for {len(names)} columns")
            yield dict(zip(names, row, strict=False))
    except csv.Error as error:
        remedy = "close each quote, write one inside of a value twice, and such a value in quotes"
        raise ValueError(f"line {rows.line_num + 1}: {error}; {remedy}") from None
