"""The bytes of media files; a record's files lie inside its media root and nowhere else."""

import base64
import functools
import io
import os
import re
from pathlib import Path
from urllib.parse import unquote

from PIL import Image, ImageOps

from megatron_vlm import stores
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.media.images import to_rgb
from megatron_vlm.files import MOST_BYTES, check_file, read_file
from megatron_vlm.imports import optional_package

LMDB_KEY = ".lmdb::"  # `folder/images.lmdb::key`
LOCAL = re.compile("file://(localhost(?=/))?", re.IGNORECASE)
SHORTEST_FILE = 100  # characters of base64
# How the images and videos begin that are read: they tell base64 without a head from a path.
MEDIA_STARTS = re.compile(
    rb"\x89PNG|\xff\xd8\xff|BM....\0\0\0\0|GIF8|RIFF....(WEBP|AVI )|II\*\0|MM\0\*|....ftyp|\x1a\x45\xdf\xa3",
    re.DOTALL,
)


def read_media(name: str, root: Path | str) -> bytes:
    """The bytes that a record names: a file, a value of an LMDB, or base64.

    A file lies under `root`, like the LMDB in `db.lmdb::key`, and may be named as an address, `file:///a.jpg`;
    base64 may lack its `data:` head. If `root` is an address, the file lies in a store.

    Raises BadSample `missing_media` if it is missing, lies outside of `root`, is not a regular file or is
    over 2 GiB, StoreError if a store does not give what it has, and ImportError for an LMDB if the package
    `lmdb` is not installed.
    """
    if name.startswith("data:"):
        return _inline(name)
    if is_base64(name):
        return _inline(f";base64,{name}")
    name = local_path(name)
    if isinstance(root, str):
        return _from_store(name, root)
    path, is_lmdb, key = name.partition(LMDB_KEY)
    try:
        if not is_lmdb:
            return read_file(_inside(name, root))
        database = _inside(path + LMDB_KEY.removesuffix("::"), root)
        if not database.exists():
            raise BadSample("missing_media", f"there is no database {database}")
        check_file(_inside(str(database / "data.mdb"), root) if database.is_dir() else database)
        value = _from_lmdb(database, key)
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the path; links in a circle
        raise _missing(name, root, error) from error
    if value is None:
        raise BadSample("missing_media", f"{database} has no key {key!r}")
    return value


def image_file(image: bytes | str | os.PathLike | Image.Image) -> bytes:
    """The file of an image as a program has it: its bytes, its path, or a PNG of PIL's, turned upright."""
    if isinstance(image, str | os.PathLike):
        return read_file(image)
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        to_rgb(ImageOps.exif_transpose(image)).save(file, "PNG")
        return file.getvalue()
    if not isinstance(image, bytes):
        kind = type(image).__name__
        raise ValueError(f"an image is of type {kind}; give the bytes of its file, its path, or PIL's Image.")
    return image


def _inside(name: str, root: Path) -> Path:
    path = (root / name).resolve()
    if path.is_relative_to(root.resolve()):
        return path
    start = str(path).removesuffix(f"/{os.path.normpath(name)}")
    if os.path.isabs(name) or start == str(path):
        remedy = "set data.media_dir=/ and give absolute paths, or copy the files"
    else:
        remedy = f"set data.media_dir={start or '/'}, or copy the files"
    detail = f"{name[:200]} leads to {path}, outside of {root}; {remedy}"
    raise BadSample("missing_media", detail)


def _from_store(name: str, root: str) -> bytes:
    try:
        return stores.read(stores.inside(root, name), MOST_BYTES)
    except (stores.NotThere, ValueError) as error:
        raise _missing(name, root, error) from error


def _missing(name: str, root: Path | str, error: Exception) -> BadSample:
    """Say that what a record names is not there, and why if it is an address."""
    if re.match(r"[a-z][a-z0-9+.-]*://", name, re.IGNORECASE):
        return BadSample("missing_media", f"{name[:200]} is an address; download it and give its path")
    return BadSample("missing_media", f"{name[:200]} under {root}: {error}")


def _inline(address: str) -> bytes:
    header, _, content = address.partition(",")
    if not header.endswith(";base64"):
        raise BadSample("missing_media", f"{header[:80]}: only base64 data addresses are read")
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except ValueError as error:
        raise BadSample("missing_media", f"{header[:80]}: {error}") from error


def _from_lmdb(database: Path, key: str) -> bytes | None:
    lmdb = optional_package("lmdb", f"data: {database}")
    try:
        with _open_lmdb(database).begin() as transaction:
            return transaction.get(key.encode())
    except (lmdb.Error, UnicodeEncodeError) as error:  # empty or overlong keys, a damaged file
        raise BadSample("missing_media", f"{database}::{key[:200]}: {error}") from error


@functools.lru_cache(maxsize=16)
def _open_lmdb(database: Path):
    """The open LMDB, cached, as lmdb refuses to open it twice. Read-only and without locks, so that forked
    workers may use it too. Raises ValueError for a file cut short: reading what is gone would be SIGBUS."""
    import lmdb

    is_folder = database.is_dir()
    opened = lmdb.open(
        str(database), subdir=is_folder, readonly=True, lock=False, readahead=False, max_readers=1024
    )
    file = database / "data.mdb" if is_folder else database
    size, needed = file.stat().st_size, (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
    if size < needed:
        opened.close()
        raise ValueError(f"{file} is cut short, {size} of {needed} bytes; copy it again")
    return opened


# -- what a name in a record is


def local_path(name: str) -> str:
    """Return the path in an address of a local file; any other name as it is."""
    scheme = LOCAL.match(name)
    return unquote(name[scheme.end() :]) if scheme else name


def is_base64(text: str) -> bool:
    """Whether a text is an image or a video in base64, by its beginning."""
    try:
        start = base64.b64decode(text[:64], validate=True) if len(text) >= SHORTEST_FILE else b""
        return MEDIA_STARTS.match(start) is not None
    except ValueError:
        return False
