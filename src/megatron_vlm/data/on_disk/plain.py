"""A file of rows as text in UTF-8, parquet or Arrow, whatever it is packed in.

Rows are read by number, which packed files and UTF-16 do not allow: what they hold is written once into the
cache of `datasets`, and takes as much disk there. So is a file in a store.
"""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm import stores
from megatron_vlm.files import check_file, folder_aside, free_bytes, open_file, open_to_write
from megatron_vlm.messages import readable_size
from megatron_vlm.signatures import what_file

MOST_LAYERS = 4
# What is raised on a packed file that is damaged
DAMAGED = (EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
TABULAR = ("parquet", "arrow")  # `datasets` reads these
TRIED = 20  # rows that tell whether a text is a table
START = 1 << 20  # bytes, in which they lie
HEADER = re.compile(r"[\w .:/-]{1,64}")  # a name of a column


def plain_file(path: str | Path) -> Path:
    """The file itself, or the file in the cache that has its content.

    Raises NotAFile and OSError as `files.open_file`, ValueError that names a file that cannot be unpacked.
    """
    plain = Path(path)
    check_file(plain)
    for _ in range(MOST_LAYERS):
        known = what_file(plain)
        if known is None or known.name not in OPENED:
            return plain
        try:
            plain = in_cache(plain, partial(_unpack, OPENED[known.name]))
        except (*DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # one of the disk
                raise
            remedy = "unpack it yourself, or download it again"
            raise ValueError(f"data: {path}: {known.what}, cannot be read ({error}); {remedy}.") from error
    raise ValueError(f"data: {path}: is packed more than {MOST_LAYERS} times; unpack it.")


def in_cache(path: Path, write: Callable[[BinaryIO, BinaryIO], None]) -> Path:
    """The file in the cache to which `write` has written what it made of the opened file."""

    def make(target: Path) -> None:
        with open_file(path) as file, open_to_write(target) as rows, io.BufferedWriter(rows) as buffered:
            write(file, buffered)

    stat = path.stat()
    return _made_once(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}", "rows", make)


def on_disk(path: str | Path) -> Path:
    """The file itself; of one in a store, the copy of its version in the cache. Raises StoreError."""
    if not stores.is_store(path):
        return Path(path)
    with stores.at(path) as (client, name):
        found = client.info(name)
        if found.type != "file":
            raise stores.NotThere(f"data: {path} is a folder; give the files in it, as a list.")
        key = f"{path} {found.content_length} {found.etag or found.last_modified}"
        return _made_once(key, Path(name).name, lambda target: client.download_file(name, str(target)))


def _made_once(key: str, name: str, make: Callable[[Path], None]) -> Path:
    folder = _cache() / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.is_dir():
        try:
            with folder_aside(folder) as aside:
                make(aside / name)
        except OSError:
            if not folder.is_dir():  # no other process was faster
                raise
    return folder / name


def _cache() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE, "unpacked")


def _unpack(opened: Callable[[BinaryIO], Any], packed: BinaryIO, file: BinaryIO) -> None:
    most = free_bytes(_cache()) * 9 // 10
    with opened(packed) as content:
        while block := content.read(1 << 20):
            if file.tell() > most:
                raise ValueError(f"it holds over {readable_size(most)}, and no more is free in {_cache()}")
            file.write(block)


def _zstd(packed: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, "r"), "zstd")


def _only_member(packed: BinaryIO) -> Any:
    archive = zipfile.ZipFile(packed)
    # macOS adds a folder of its own and files whose names begin with a dot
    names = [
        entry.filename
        for entry in archive.infolist()
        if not (entry.is_dir() or entry.filename.startswith("__MACOSX/"))
        and not Path(entry.filename).name.startswith(".")
    ]
    if len(names) != 1:
        raise ValueError(f"it holds {len(names)} files, and one is read")
    return archive.open(names[0])


PACKED: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": gzip.open,
    "bz2": bz2.open,
    "xz": lzma.open,
    "zstd": _zstd,
    "zip": _only_member,
}
OPENED = PACKED | {
    encoding: partial(codecs.EncodedFile, data_encoding="utf-8", file_encoding=encoding)
    for encoding in ("utf-32", "utf-16", "utf-16-le", "utf-16-be")
}


def table_of(plain: Path) -> tuple[str, list[list[str]]] | None:
    """The separator of a text with a header, such as CSV, and its first rows; None for other texts."""
    with open_file(plain) as file:
        start = file.read(START)
    text = start.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    csv.field_size_limit(START)  # images in base64
    for delimiter in "\t,;|" if text.lstrip()[:1] not in ("{", "[") else "":
        with suppress(csv.Error):
            rows = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), TRIED))
            if len(start) == START and len(rows) < TRIED:
                rows.pop()  # cut
            rows = list(filter(None, rows))
            names = rows[0] if len(rows) > 1 else []
            if names[:1] == [""]:
                names[0] = "Unnamed: 0"  # an index that pandas wrote, as it is named when it is read
            if len(set(names)) == len(names) > 1 and all(HEADER.fullmatch(name.strip()) for name in names):
                if 2 * sum(len(row) == len(names) for row in rows) >= len(rows):
                    return delimiter, rows
    return None
