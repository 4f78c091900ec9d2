"""A file of rows as text, parquet or Arrow, whatever it is packed in.

Rows are read by number, which packed files do not allow: what they hold is written once into the cache of
`datasets`, and takes as much disk there. So is a file in a store.
"""

import csv
import hashlib
import io
import lzma
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from megatron_vlm import stores
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.files import MOST_TEXT, open_file, open_to_write

# What is raised on a packed file that is damaged
DAMAGED = (EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
# How packed and tabular files begin, in bytes that no text has.
PACKINGS = {
    rb"\x1f\x8b": "gzip",
    rb"BZh[1-9]1AY&SY": "bz2",
    rb"\xfd7zXZ\0": "xz",
    rb"\x28\xb5\x2f\xfd": "zstd",
    rb"PK\x03\x04": "zip",
}
TABULAR_STARTS = {
    rb"PAR1[\0-\x08\x0e-\x1f]": "parquet",
    rb"ARROW1\0\0": "arrow",
    rb"\xff\xff\xff\xff..\0\0": "arrow",
}
START_BYTES = 16
TRIED = 20  # rows that tell whether a text is a table
START = 1 << 20  # bytes, in which they lie
HEADER = re.compile(r"[\w .:/-]{1,64}")  # a name of a column


def plain_file(path: str | Path) -> Path:
    """The file itself, or the file in the cache that has its content.

    Raises NotAFile and OSError as `files.open_file`, ValueError that names a file that cannot be unpacked.
    """
    plain = Path(path)
    if (packing := _kind(plain, PACKINGS)) is None:
        return plain
    try:
        return in_cache(plain, partial(_unpack, plain, packing))
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # one of the disk
            raise
        remedy = "unpack it yourself, or download it again"
        raise damaged(path, f"a {packing} file, cannot be read ({error})", remedy) from error


def tabular_kind(plain: Path) -> str | None:
    """Return `parquet` or `arrow` for a file that begins as one; None for text."""
    return _kind(plain, TABULAR_STARTS)


def _kind(path: Path, starts: dict[bytes, str]) -> str | None:
    with open_file(path) as file:
        start = file.read(START_BYTES)
    return next((kind for magic, kind in starts.items() if re.match(magic, start, re.DOTALL)), None)


def in_cache(path: Path, make: Callable[[Path], None]) -> Path:
    """The file in the cache that `make` writes once for this version of a file."""
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
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE, "unpacked", hashlib.sha256(key.encode()).hexdigest()[:24])
    return stores.made_once(folder, lambda aside: make(aside / name)) / name


def _unpack(path: Path, packing: str, target: Path) -> None:
    """Write what a packed file holds. Raises ValueError for a zip of several files."""
    if packing == "zstd":  # `datasets` would need a package more
        import pyarrow

        with pyarrow.input_stream(path, compression="zstd") as rows, open_to_write(target) as file:
            file.writelines(iter(partial(rows.read, 1 << 20), b""))
            return
    from datasets.utils.extract import Extractor

    Extractor.extractors[packing].extract(path, target)
    if packing == "zip":
        members = target.rename(target.with_name("members"))
        # macOS adds a folder of its own, and files whose names begin with a dot.
        files = [file for file in members.rglob("[!.]*") if file.is_file() and "__MACOSX" not in file.parts]
        if len(files) != 1:
            raise ValueError(f"it holds {len(files)} files, and one is read; save an Excel table as CSV")
        files[0].rename(target)
        shutil.rmtree(members)


def table_of(plain: Path) -> tuple[str, list[list[str]]] | None:
    """The separator of a text with a header, such as CSV, and its first rows; None for other texts."""
    with open_file(plain) as file:
        start = file.read(START)
    text = start.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    csv.field_size_limit(MOST_TEXT)  # images in base64
    for delimiter in "\t,;|" if text.lstrip()[:1] not in ("{", "[") else "":
        rows = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), TRIED))
        if len(start) == START and len(rows) < TRIED:
            rows.pop()  # cut
        rows = list(filter(None, rows))
        names = rows[0] if len(rows) > 1 else []
        if names[:1] == [""]:
            names[0] = "Unnamed: 0"  # an index that pandas wrote, as it is named when it is read
        if len(set(names)) == len(names) > 1 and all(map(_is_column_name, names)):
            if 2 * sum(len(row) == len(names) for row in rows) >= len(rows):
                return delimiter, rows
    return None


def _is_column_name(text: str) -> bool:
    return HEADER.fullmatch(text.strip()) is not None and not text.lower().endswith((*PICTURES, *FILMS))


def check_quotes(path: str | Path, delimiter: str) -> None:
    """Raise ValueError for a table with a quote that is not closed: pandas would join rows up to the next."""
    row: list[str] = []  # the lines of the row that is read

    def lines(file: BinaryIO) -> Iterator[str]:
        for line in io.TextIOWrapper(file, "utf-8-sig", "replace", newline=""):
            row.append(line)
            yield line

    with open_file(plain_file(path)) as file:
        reader = csv.reader(lines(file), delimiter=delimiter)
        for _ in reader:
            # Text between a closing quote and the next separator shows that the quote opened another value.
            if len(row) > 1 or row[-1:] and row[-1].count('"') % 2:
                try:
                    list(csv.reader(row, delimiter=delimiter, strict=True))
                except csv.Error as error:
                    fact = f"line {reader.line_num - len(row) + 1} has a quote that is not closed"
                    remedy = "close it; write a quote inside of a value twice, and such a value in quotes"
                    raise damaged(path, fact, remedy) from error
            row.clear()
